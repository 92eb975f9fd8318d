"""Text that grows token by token, in whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.planner_app.server.generation import Sampling
from pagecast.planner_app.server.tokenizer import Tokenizer

_UNFINISHED = "�"  # the text of a character's first bytes


class GrowingText:
    """The text of a growing list of token ids.

    `sampling.stop`: strings at which the text ends; what may be the beginning of one is held back until it is
    clear. `stopped` is the string that was met; with `sampling.include_stop` it is left in the text. As in
    vLLM, a stop string that ends within the first `sampling.min_tokens` tokens is text like any other.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._tokenizer = tokenizer
        self._alone = tokenizer.alone
        self._stop = sampling.stop
        self._include_stop = sampling.include_stop
        self._unstoppable = sampling.min_tokens if self._stop else 0  # tokens to come before a stop counts
        self._hold = max((len(text) for text in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._start = 0  # decoding from here gives the same text as decoding everything
        self._given_out = 0  # ids whose text has been given out
        self._tail = ""
        self.stopped: str | None = None

    def add(self, ids: Sequence[int]) -> str:
        """The text that tokens add, less what is held back."""
        text = ""
        if self._unstoppable:
            first, ids = ids[: self._unstoppable], ids[self._unstoppable :]
            self._unstoppable -= len(first)
            text = self._hold_back(self._tail + self._text_of(first))
        if self.stopped is not None or not ids:
            return text
        piece = self._text_of(ids)
        return text + (self._until_stop(piece) if self._stop else piece)

    def rest(self) -> str:
        """The text held back so far, to be called when no more tokens come."""
        if self.stopped is not None:
            return ""
        tail, self._tail = self._tail, ""
        if self._alone:
            return tail
        before = self._tokenizer.decode(self._ids[self._start : self._given_out])
        return tail + self._tokenizer.decode(self._ids[self._start :])[len(before) :]

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if self._alone else self._grow(ids)

    def _grow(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        before = self._tokenizer.decode(self._ids[self._start : self._given_out])
        after = self._tokenizer.decode(self._ids[self._start :])
        if after.endswith(_UNFINISHED):
            return ""
        self._start = self._given_out
        self._given_out = len(self._ids)
        return after[len(before) :]

    def _until_stop(self, piece: str) -> str:
        text = self._tail + piece
        # What was there before has been looked through: a stop string ends in the new piece.
        places = [(text.find(stop, max(len(self._tail) - len(stop) + 1, 0)), stop) for stop in self._stop]
        met = [(at, stop) for at, stop in places if at >= 0]
        if met:
            at, self.stopped = min(met)
            self._tail = ""
            return text[: at + len(self.stopped)] if self._include_stop else text[:at]
        return self._hold_back(text)

    def _hold_back(self, text: str) -> str:
        """Keeps what may be the beginning of a stop string; returns the text before it."""
        keep = max(len(text) - self._hold, 0)
        self._tail = text[keep:]
        return text[:keep]
