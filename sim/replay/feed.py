"""Turns the rows of a trace into requests for the core, one at a time, when they are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pagecast.sim.core.identity.content import own_output, own_prompt, tokens
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope
from pagecast.sim.core.request import Request
from pagecast.traces.schema import Trace


class Feed:
    """A trace's requests by row number. Building one costs a few microseconds, and nothing is kept.

    Prompts without spans or token ids are unique: shared with nobody, save where a later turn quotes
    the output by its content.
    """

    def __init__(self, trace: Trace, block_size: int) -> None:
        table = trace.requests
        self.block_size = block_size
        self.count = len(table)
        self.input_tokens: list[int] = table["input_tokens"].to_numpy(np.int64).tolist()
        self.output_tokens: list[int] = table["output_tokens"].to_numpy(np.int64).tolist()
        self._priority = _column(trace, "priority")
        self._output_content = _column(trace, "output_content")
        self._output_offset = _column(trace, "output_offset")
        self._spans = None
        if trace.spans is not None:
            spans = trace.spans
            self._spans = (spans.start.tolist(), spans.content, spans.offset, spans.length)
        self._ids = trace.token_ids
        self._scopes = _scopes(trace)

    def request(self, row: int, arrival_ns: int) -> Request:
        """The request of a row, arriving at `arrival_ns`. Its id is the row number."""
        prompt, output = self.input_tokens[row], self.output_tokens[row]
        request = Request(
            str(row),
            self._keys(row, prompt, output),
            prompt,
            output,
            arrival_ns=arrival_ns,
            index=row,
        )
        if self._priority is not None:
            request.priority = self._priority[row]
        return request

    def _keys(self, row: int, prompt: int, output: int) -> BlockKeys:
        scope = DEFAULT_SCOPE if self._scopes is None else self._scopes[row]
        generated = (own_output(row), 0)
        if self._output_content is not None and self._output_content[row] >= 0:
            offset = self._output_offset[row] if self._output_offset is not None else 0
            generated = (self._output_content[row], offset)
        if self._ids is not None:
            keys = BlockKeys.of_ids(self.block_size, self._ids[row], scope)
            keys.extend(tokens(generated[0], generated[1], output).view(np.int64))
            return keys
        if self._spans is not None:
            start, contents, offsets, lengths = self._spans
            a, b = start[row], start[row + 1]
            if b > a:
                pieces = zip(
                    contents[a:b].tolist(), offsets[a:b].tolist(), lengths[a:b].tolist(), strict=True
                )
                return BlockKeys.of_spans(self.block_size, list(pieces), generated, scope)
        return BlockKeys.of_spans(
            self.block_size, ((own_prompt(row), 0, prompt),), generated, scope, merged=True
        )


def _column(trace: Trace, name: str) -> list[int] | None:
    """A whole-number column as a list; None where it is absent."""
    if name not in trace.requests:
        return None
    values: npt.NDArray[np.int64] = trace.requests[name].to_numpy(np.int64)
    numbers: list[int] = values.tolist()
    return numbers


def _scopes(trace: Trace) -> list[Scope] | None:
    """The scope of each row; None where all have the default one."""
    names = [name for name in ("model", "adapter", "salt") if name in trace.requests]
    if not names:
        return None
    made: dict[tuple[Any, ...], Scope] = {}
    columns = [trace.requests[name].fillna("").astype(str).tolist() for name in names]
    scopes = []
    for values in zip(*columns, strict=True):
        if values not in made:
            made[values] = Scope(**dict(zip(names, values, strict=True)))
        scopes.append(made[values])
    return scopes
