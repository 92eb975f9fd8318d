"""Text that grows token by token, in whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from pagecast.planner_app.server.tokenizer import Tokenizer

_UNFINISHED = "�"  # the text of a character's first bytes


class GrowingText:
    """The text of a growing list of token ids.

    `stop`: strings at which the text ends; what may be the beginning of one is held back until it is clear.
    `stopped` is the string that was met. `include_stop`: leave it in the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._alone = tokenizer.alone
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._hold = max((len(text) for text in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._start = 0  # decoding from here gives the same text as decoding everything
        self._given_out = 0  # ids whose text has been given out
        self._tail = ""
        self.stopped: str | None = None

    def add(self, ids: Sequence[int]) -> str:
        """The text that tokens add, less what is held back."""
        if self.stopped is not None:
            return ""
        piece = self._tokenizer.decode(ids) if self._alone else self._grow(ids)
        return self._until_stop(piece) if self._stop else piece

    def rest(self) -> str:
        """The text held back so far, to be called when no more tokens come."""
        if self.stopped is not None:
            return ""
        tail, self._tail = self._tail, ""
        if self._alone:
            return tail
        before = self._tokenizer.decode(self._ids[self._start : self._given_out])
        return tail + self._tokenizer.decode(self._ids[self._start :])[len(before) :]

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
        met = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if met:
            at, self.stopped = min(met)
            self._tail = ""
            return text[: at + len(self.stopped)] if self._include_stop else text[:at]
        keep = len(text) - self._hold if self._hold else len(text)
        keep = max(keep, 0)
        self._tail = text[keep:]
        return text[:keep]
