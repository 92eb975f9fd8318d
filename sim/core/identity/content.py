"""Content spans, and the one function that turns them into token ids.

Traces seldom publish tokens. They say which tokens are equal: a span `(content, offset, length)` is
tokens `offset .. offset + length` of a text identified by the integer `content`. Two prompts share a
prefix exactly as far as their merged spans agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

_MASK = (1 << 64) - 1
# Contents with negative names are private: `own_output` and `own_prompt` make them.
_PRIVATE = -(1 << 62)
_ITEMS = -(1 << 61)  # multimodal items have ids of 60 bits below it


class Span(NamedTuple):
    """`length` tokens of the text `content`, from token `offset` on."""

    content: int
    offset: int
    length: int


def own_prompt(index: int) -> int:
    """The content id of request number `index`'s prompt where a trace names none: shared by nobody."""
    return _PRIVATE + 2 * index


def own_output(index: int) -> int:
    """The content id of the tokens that request number `index` generates."""
    return _PRIVATE + 2 * index + 1


def item(identifier: str) -> int:
    """The content id of an image, clip or the like, by the digest that an engine knows it by."""
    return _ITEMS - xxhash.xxh3_64_intdigest(identifier.encode()) % (1 << 60)


def with_items(
    spans: Iterable[tuple[int, int, int]], items: Iterable[tuple[str, int, int]]
) -> list[tuple[int, int, int]]:
    """A prompt with multimodal items `(identifier, offset, length)` in the place of its placeholders.

    Where a block holds a part of an item, its key has the item and where in the block it begins: the same
    that vLLM adds to the block's tokens. Items are in order and do not overlap.
    """
    items_ahead = list(items)[::-1]
    content_spans: list[tuple[int, int, int]] = []
    position = 0
    for content, offset, length in spans:
        end = position + length
        while position < end:
            begin = items_ahead[-1][1] if items_ahead else end
            if position < begin:
                plain = min(begin, end) - position
                content_spans.append((content, offset + position - (end - length), plain))
                position += plain
                continue
            name, _, size = items_ahead[-1]
            part = min(begin + size, end) - position
            content_spans.append((item(name), position - begin, part))
            position += part
            if position == begin + size:
                items_ahead.pop()
    return content_spans


def merge(spans: Iterable[tuple[int, int, int]]) -> list[Span]:
    """Joins adjacent spans of one text and drops empty ones, so that equal tokens have one form."""
    merged: list[Span] = []
    for content, offset, length in spans:
        if length <= 0:
            continue
        if merged and merged[-1].content == content and merged[-1].offset + merged[-1].length == offset:
            last = merged[-1]
            merged[-1] = Span(content, last.offset, last.length + length)
        else:
            merged.append(Span(content, offset, length))
    return merged


def split_spans(spans: Iterable[Span], at: int) -> tuple[list[Span], list[Span]]:
    """The spans of the first `at` tokens, and of the others."""
    head: list[Span] = []
    tail: list[Span] = []
    for content, offset, length in spans:
        first = min(max(at, 0), length)
        if first:
            head.append(Span(content, offset, first))
        if first < length:
            tail.append(Span(content, offset + first, length - first))
        at -= length
    return head, tail


def tokens(content: int, offset: int, length: int) -> npt.NDArray[np.uint64]:
    """Token ids of a span, 64 bits each: a fixed mix of content id and offset (splitmix64).

    Distinct `(content, offset)` pairs give distinct ids but for chance in 2**64. An engine takes them
    modulo its vocabulary.
    """
    with np.errstate(over="ignore"):
        name = _mix(np.uint64(content & _MASK) + np.uint64(0x9E3779B97F4A7C15))
        index = np.arange(offset, offset + length, dtype=np.uint64)
        return _mix(name ^ _mix(index + np.uint64(0xD1B54A32D192ED03)))


def token_ids(spans: Sequence[tuple[int, int, int]]) -> npt.NDArray[np.uint64]:
    """Token ids of a whole prompt given as spans."""
    if not spans:
        return np.empty(0, dtype=np.uint64)
    return np.concatenate([tokens(*span) for span in spans])


def _mix(value: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)), dtype=np.uint64)
