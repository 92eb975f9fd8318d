"""The interface of executors, which run a function over items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")
Progress = Callable[[int], None]  # called with the number of items done


class Executor(ABC):
    """Runs a function over items. Both, and the answers, must be picklable, and the function importable.

    An exception raised for an item ends the whole, and comes through as it is.
    """

    @abstractmethod
    def stream(
        self, function: Callable[[ItemT], AnswerT], items: Sequence[ItemT]
    ) -> Generator[tuple[int, AnswerT], None, None]:
        """Yields `(index of the item, answer)` as answers come; closing it drops what has not begun."""

    def until_interrupt(
        self, function: Callable[[ItemT], AnswerT], items: Sequence[ItemT]
    ) -> Generator[tuple[int, AnswerT], None, None]:
        """As `stream`; an interrupt ends it after the answers that came. Raises it where none did."""
        came = False
        answers = self.stream(function, items)
        try:
            for each in answers:
                came = True
                yield each
        except KeyboardInterrupt:
            if not came:
                raise
            self.abandon()
        finally:
            answers.close()

    def map(
        self, function: Callable[[ItemT], AnswerT], items: Sequence[ItemT], progress: Progress | None = None
    ) -> list[AnswerT]:
        """The answers in the order of `items`; `progress` is called with the number of answers so far."""
        answers: dict[int, AnswerT] = {}
        for index, answer in self.stream(function, items):
            answers[index] = answer
            if progress is not None:
                progress(len(answers))
        return [answers[index] for index in range(len(items))]

    def close(self) -> None:
        """Ends workers, without waiting for what they have not begun."""
        return

    def abandon(self) -> None:
        """Ends workers at once, in the middle of what they do: nobody waits for it any more."""
        return
