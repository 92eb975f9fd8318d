"""Text and token ids: the model's tokenizer, and text that grows a token at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagecast.sim.core.errors import BadInput

_UNFINISHED = "�"  # what a tokenizer gives for the first bytes of a character


def tokenizer(folder: Path | None) -> Any:
    """The tokenizer in a transformers folder; None where there is none."""
    if folder is None or not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{folder}: the tokenizer can't be read ({error})") from None


_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Growing:
    """Turns a growing list of token ids into pieces of text, each a whole number of characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # decoding from here gives the same text as decoding everything
        self._shown = 0  # ids whose text has been given out

    def add(self, token: int) -> str:
        """The text that a token adds; empty where a character is still unfinished."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._shown])
        after = self._decode(self._ids[self._start :])
        if after.endswith(_UNFINISHED):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def rest(self) -> str:
        """The rest of the text when no more tokens come."""
        before = self._decode(self._ids[self._start : self._shown])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
