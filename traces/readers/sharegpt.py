"""ShareGPT-like JSON: conversations as text, which a tokenizer turns into lengths and shared contents.

An array (or lines) of objects with `conversations` (`from`: human, gpt; `value`) or `messages` (`role`:
user, assistant; `content`). Every answer is a request whose prompt is all that was said before it. There
are no times: sessions start as a Poisson process, and the next turn comes a fixed think time after the
answer. Messages are tokenized one by one, without the special tokens a chat template adds. Conversations
that begin with the same messages share those tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.building import NO_REQUESTS, RequestRows
from pagecast.traces.head import json_fields
from pagecast.traces.operations import sort as sort_trace
from pagecast.traces.records import Record, items
from pagecast.traces.schema import Spans, Trace, starts
from pagecast.traces.seeds import checked_seed
from pagecast.traces.source import Source

Encode = Callable[[str], Sequence[int]]
Named = tuple[int, int]  # a message: the name of its text, and its tokens
SESSION_RATE = 1.0
THINK_S = 10.0
recognise = json_fields("conversations", "messages", "from", "value", "role", "content")
_ANSWERS = {"gpt", "assistant", "chatgpt", "bing", "bard", "model"}
_COLUMNS = (
    "arrival_s",
    "input_tokens",
    "output_tokens",
    "session",
    "after",
    "gap_s",
    "output_content",
    "output_offset",
)


def read(
    source: Source,
    *,
    tokenizer: Encode | str | Path | None = None,
    limit: int | None = None,
    session_rate: float | None = None,
    think_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """Reads the file with `tokenizer`: a function from text to token ids, or a transformers folder.

    Sessions start at `session_rate` per second (1 unless given); turns follow `think_s` seconds (10) after
    the answer before them. Raises BadInput without a tokenizer.
    """
    law = ArrivalProcess("poisson", SESSION_RATE if session_rate is None else session_rate)
    think = THINK_S if think_s is None else think_s
    played = _ConversationRows(source, law, think, seed)
    texts = _Texts(load_tokenizer(source, tokenizer))
    for record in items(source):
        played.add(record, _turns(record, texts), limit)
        if limit is not None and len(played.rows) >= limit:
            break
    return played.finish(
        f"the format has no times: sessions start at {law.rate:g} per second (Poisson, seed {seed}; "
        f"choose with --session-rate), turns follow {think:g} s after the last answer (--think)"
    )


class _ConversationRows:
    """The conversations so far as requests, each starting a while after the one before."""

    def __init__(self, source: Source, law: ArrivalProcess, think_s: float, seed: int) -> None:
        self.rows = RequestRows(source, _COLUMNS)
        self._source, self._law, self._think_s = source, law, think_s
        self._rng = np.random.default_rng(checked_seed(seed))
        self._now_s = 0.0
        self._number = 0
        self._counts, self._flat = array("q"), array("q")

    def add(self, record: Record, turns: Iterable[tuple[list[Named], Named]], limit: int | None) -> None:
        """Plays one conversation; a conversation without an answer is passed over."""
        before = -1
        for prompt, (answer, output_tokens) in turns:
            arrival_s, gap_s = (self._now_s, 0.0) if before < 0 else (math.nan, self._think_s)
            tokens = sum(length for _, length in prompt)
            session = f"c{self._number}"
            self.rows.add(record.line, arrival_s, tokens, output_tokens, session, before, gap_s, answer, 0)
            before = len(self.rows) - 1
            self._counts.append(len(prompt))
            for content, length in prompt:
                self._flat.extend((content, 0, length))
            if limit is not None and len(self.rows) >= limit:
                break
        if before >= 0:
            self._now_s += float(self._law.gaps_s(1, self._rng)[0])
            self._number += 1

    def finish(self, note: str) -> Trace:
        """The trace. Raises BadInput where no conversation had an answer."""
        if not len(self.rows):
            raise self._source.fail(NO_REQUESTS)
        content, offset, length = np.frombuffer(self._flat, dtype=np.int64).reshape(-1, 3).T.copy()
        spans = Spans(starts(np.frombuffer(self._counts, dtype=np.int64)), content, offset, length)
        return sort_trace(self.rows.finish(spans, notes=[note]))


class _Texts:
    """Names messages: equal messages after equal beginnings have one name and are tokenized once."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._entries: dict[tuple[int, str], Named] = {}

    def name(self, after: int, text: str) -> Named:
        """The message's name and its tokens, given the name of the message before it (-1: none)."""
        key = (after, text)
        if key not in self._entries:
            self._entries[key] = (len(self._entries), len(self._encode(text)))
        return self._entries[key]


def _turns(record: Record, texts: _Texts) -> Iterable[tuple[list[Named], Named]]:
    """For every answer, the named messages before it and its own name and length."""
    field = "conversations" if "conversations" in record.values else "messages"
    history: list[Named] = []
    last = -1
    for message in record.items(field):
        speaker, text = _message(record, field, message)
        content = texts.name(last, text)
        last = content[0]
        if speaker in _ANSWERS and history and content[1]:
            yield list(history), content
        if content[1]:
            history.append(content)


def _message(record: Record, field: str, message: Any) -> tuple[str, str]:
    if isinstance(message, dict):
        speaker = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if isinstance(speaker, str) and isinstance(text, str):
            return speaker, text
    raise record.fail(field, "every message needs a speaker (from, role) and a text (value, content)")


def load_tokenizer(source: Source, tokenizer: Encode | str | Path | None) -> Encode:
    """A function from text to token ids. Raises CannotRunHere where transformers is not installed."""
    if tokenizer is None:
        raise source.fail("texts without token counts; add --tokenizer FOLDER, of a transformers tokenizer")
    if callable(tokenizer):
        return tokenizer
    if not Path(tokenizer).is_dir():
        raise BadInput(f"{tokenizer}: no such folder; give one that holds a transformers tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise CannotRunHere(
            "a tokenizer folder needs transformers; install it: pip install 'pagecast[engine]'"
        ) from None
    try:
        loaded = AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{tokenizer}: no tokenizer can be loaded ({str(error)[:120]!r})") from None

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False)
        return ids

    return encode
