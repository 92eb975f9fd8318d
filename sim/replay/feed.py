"""Feed of a replay: rows of a trace as requests for the core, made one at a time when they are needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.content import item, own_output, own_prompt, tokens, with_items
from pagecast.sim.core.identity.keys import BlockKeys, Public
from pagecast.sim.core.identity.scope import DEFAULT_SCOPE, Scope
from pagecast.sim.core.request import Request
from pagecast.sim.core.retention import Retention
from pagecast.sim.core.tenants import Tenancy
from pagecast.sim.replica.arrivals import NS
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Spans, Trace
from pagecast.traces.texts import multimodal_items

_ROWS_AT_ONCE = 256
_PARTS = 64  # kept at once


class Feed:
    """A trace's requests by row number. Building one costs a few microseconds, and nothing is kept.

    Prompts without spans or token ids are unique: shared with nobody, save where a later turn quotes
    the output by its content. `scenario` says what a trace leaves open: retention, isolation and which
    namespaces are public. `lookahead`: tokens after a block that its key covers.
    """

    def __init__(
        self, trace: Trace, block_size: int, scenario: Scenario | None = None, *, lookahead: int = 0
    ) -> None:
        table = trace.requests
        self.block_size = block_size
        self._lookahead = lookahead
        self.count = len(table)
        self.input_tokens: list[int] = table["input_tokens"].to_numpy(np.int64).tolist()
        self.output_tokens: list[int] = table["output_tokens"].to_numpy(np.int64).tolist()
        self._priority = _column(trace, "priority")
        self._max_tokens = _column(trace, "max_tokens")
        self._output_content = _column(trace, "output_content")
        self._output_offset = _column(trace, "output_offset")
        self._spans = None
        if trace.spans is not None:
            spans = trace.spans
            self._spans = SpanRows(spans)
        self._ids = trace.token_ids
        self._tenants = _texts(trace, "tenant")
        tenancy = Tenancy() if scenario is None else scenario.tenancy
        self._scopes = _scopes(trace, isolated=tenancy.isolation == "tenant")
        self._public = _public(trace, tenancy.public_namespaces)
        self._adapters = _texts(trace, "adapter")
        self._items = _texts(trace, "multimodal")
        rollout = None if scenario is None else scenario.rollout_at_s
        self._rollout_ns = None if rollout is None else round(rollout * NS)
        self.new_keys: set[bytes] = set()  # of requests of the new revision, where there is a rollout
        self._retention = _retention(trace, None if scenario is None else scenario.cache.retention)
        wishes = (self._priority, self._max_tokens, self._adapters, self._tenants, self._retention)
        self._has_wishes = any(column is not None for column in (*wishes, self._items))
        details = (self._ids, self._items, self._public)
        self._has_details = any(column is not None for column in details)

    def request(self, row: int, arrival_ns: int) -> Request:
        """The request of a row, arriving at `arrival_ns`. Its id is the row number."""
        request = Request(
            str(row),
            self.keys(row, revised=self.is_revised(arrival_ns)),
            self.input_tokens[row],
            self.output_tokens[row],
            arrival_ns=arrival_ns,
            index=row,
        )
        if self._has_wishes:
            self._add_wishes(request, row)
        return request

    def _add_wishes(self, request: Request, row: int) -> None:
        """Gives a request what its row asks for beside tokens."""
        if self._priority is not None:
            request.priority = self._priority[row]
        if self._max_tokens is not None:
            request.max_tokens = max(self._max_tokens[row], request.output_tokens)
        if self._adapters is not None:
            request.adapter = self._adapters[row]
        if self._tenants is not None:
            request.tenant = self._tenants[row]
        if self._retention is not None:
            request.retention = self._retention[row]
        if self._items is not None:
            request.items = _items_of(self._items[row], self.input_tokens[row], row)

    def is_revised(self, arrival_ns: int) -> bool:
        """Whether a request that arrives then is for the new revision of its model."""
        return self._rollout_ns is not None and arrival_ns >= self._rollout_ns

    def keys(self, row: int, *, revised: bool = False) -> BlockKeys:
        """The keys of a row's blocks; `revised`: for the new revision of its model."""
        scope = DEFAULT_SCOPE if self._scopes is None else self._scopes[row]
        if not revised:
            return self._keys_in(row, scope)
        keys = self._keys_in(row, replace(scope, model=f"{scope.model} (new revision)"))
        self.new_keys.update(keys.digests)
        return keys

    def _keys_in(self, row: int, scope: Scope) -> BlockKeys:
        output = (own_output(row), 0) if self._output_content is None else self._output(row)
        if self._has_details:
            return self._detailed_keys(row, scope, output)
        spans = self._spans_of(row)
        # A single span is in its one form.
        return BlockKeys.of_spans(
            self.block_size, spans, output, scope, merged=len(spans) == 1, lookahead=self._lookahead
        )

    def _output(self, row: int) -> tuple[int, int]:
        """The text that a row generates, and where in it: its own where the trace names none."""
        if self._output_content is None or self._output_content[row] < 0:
            return own_output(row), 0
        return self._output_content[row], 0 if self._output_offset is None else self._output_offset[row]

    def _spans_of(self, row: int) -> list[tuple[int, int, int]]:
        """The spans of a row's prompt: one of its own where the trace has none."""
        spans = None if self._spans is None else self._spans.of(row)
        return spans or [(own_prompt(row), 0, self.input_tokens[row])]

    def _detailed_keys(self, row: int, scope: Scope, output: tuple[int, int]) -> BlockKeys:
        """The keys of a row that may have token ids, multimodal items or public tokens."""
        prompt = self.input_tokens[row]
        public = None if self._public is None else self._public[row]
        items = _items_of(self._items[row], prompt, row) if self._items is not None else []
        if self._ids is not None:
            ids = _ids_with(self._ids[row], items) if items else self._ids[row]
            keys = BlockKeys.of_ids(self.block_size, ids, scope, public=public, lookahead=self._lookahead)
            keys.extend(tokens(output[0], output[1], self.output_tokens[row]).view(np.int64))
            return keys
        if self._spans is None or not self._spans.of(row):
            public = None
        spans = self._spans_of(row)
        if items:
            spans = with_items(spans, items)
        return BlockKeys.of_spans(
            self.block_size,
            spans,
            output,
            scope,
            merged=len(spans) == 1,
            public=public,
            lookahead=self._lookahead,
        )


class SpanRows:
    """The spans of rows as tuples, made for many rows at once: sessions ask for theirs in turns."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        # By number, `_ROWS_AT_ONCE` rows each: where the spans of each row start in those of all.
        self._parts: dict[int, tuple[list[int], list[tuple[int, int, int]]]] = {}

    def of(self, row: int) -> list[tuple[int, int, int]]:
        """The spans `(content, offset, length)` of a row; none where it has no content."""
        part, number = divmod(row, _ROWS_AT_ONCE)
        if part not in self._parts:
            self._keep(part)
        starts, pieces = self._parts[part]
        return pieces[starts[number] : starts[number + 1]]

    def _keep(self, part: int) -> None:
        """Makes a part, in place of the one made first where there are many."""
        if len(self._parts) == _PARTS:
            del self._parts[next(iter(self._parts))]
        spans, first = self._spans, part * _ROWS_AT_ONCE
        starts = spans.start[first : first + _ROWS_AT_ONCE + 1]
        low, high = int(starts[0]), int(starts[-1])
        columns = (spans.content, spans.offset, spans.length)
        pieces = list(zip(*(column[low:high].tolist() for column in columns), strict=True))
        self._parts[part] = (starts - low).tolist(), pieces


def _items_of(text: str, tokens: int, row: int) -> list[tuple[str, int, int]]:
    """The multimodal items of a prompt of so many tokens. Errors: BadInput naming the row."""
    try:
        return multimodal_items(text, tokens)
    except BadInput as error:
        raise BadInput(f"row {row}: multimodal: {error}") from None


def _ids_with(ids: Ints, items: list[tuple[str, int, int]]) -> Ints:
    """Token ids with those of multimodal items in the place of their placeholders."""
    changed_ids = np.array(ids, dtype=np.int64)
    for name, offset, length in items:
        changed_ids[offset : offset + length] = tokens(item(name), 0, length).view(np.int64)
    return changed_ids


def _texts(trace: Trace, name: str) -> list[str] | None:
    """A text column as a list; None where it is absent."""
    if name not in trace.requests:
        return None
    texts: list[str] = trace.requests[name].fillna("").astype(str).tolist()
    return texts


def _column(trace: Trace, name: str) -> list[int] | None:
    """A whole-number column as a list; None where it is absent."""
    if name not in trace.requests:
        return None
    values: Ints = trace.requests[name].to_numpy(np.int64)
    numbers: list[int] = values.tolist()
    return numbers


def _retention(trace: Trace, default: Retention | None) -> list[Retention | None] | None:
    """The retention that each row asks for; None where no row does. Errors: BadInput naming the row."""
    texts = _texts(trace, "retention")
    if texts is None:
        return None if default is None else [default] * len(trace)
    by_text: dict[str, Retention | None] = {"": default}
    for row, text in enumerate(texts):
        if text not in by_text:
            try:
                by_text[text] = Retention.parse(text)
            except BadInput as error:
                raise BadInput(f"{trace.name}: row {row}: {error}") from None
    return [by_text[text] for text in texts]


_SCOPE = ("model", "tokenizer", "adapter", "positional", "salt")


def _public(trace: Trace, namespaces: tuple[str, ...] | None) -> list[Public | None] | None:
    """The public tokens of each row, of namespaces that are declared; None where there are none.

    Errors: BadInput for more public tokens than the prompt has.
    """
    names = _texts(trace, "namespace")
    tokens = _column(trace, "public_tokens")
    if not namespaces or names is None or tokens is None:
        return None
    declared = set(namespaces)
    scopes = _scopes(trace, isolated=False) or [DEFAULT_SCOPE] * len(trace)
    public_scopes: dict[tuple[Scope, str], Scope] = {}
    public: list[Public | None] = []
    for row, (name, count, scope, prompt) in enumerate(
        zip(names, tokens, scopes, trace.integers("input_tokens").tolist(), strict=True)
    ):
        if count > prompt:
            raise BadInput(f"{trace.name}: row {row} has {count} public tokens, and {prompt} in its prompt")
        if name not in declared or not count:
            public.append(None)
            continue
        if (scope, name) not in public_scopes:
            public_scopes[scope, name] = replace(scope, salt=f"public/{name}")
        public.append(Public(count, public_scopes[scope, name]))
    return public


def _scopes(trace: Trace, *, isolated: bool) -> list[Scope] | None:
    """The scope of each row; None where all have the default one. `isolated`: the tenant is part of it."""
    names = [name for name in _SCOPE if name in trace.requests]
    if isolated and "tenant" in trace.requests:
        return _isolated(trace, names)
    if not names:
        return None
    by_values: dict[tuple[Any, ...], Scope] = {}
    columns = [trace.requests[name].fillna("").astype(str).tolist() for name in names]
    scopes = []
    for values in zip(*columns, strict=True):
        if values not in by_values:
            by_values[values] = Scope(**dict(zip(names, values, strict=True)))
        scopes.append(by_values[values])
    return scopes


def _isolated(trace: Trace, names: list[str]) -> list[Scope]:
    """Scopes with the tenant in the salt. A request of no tenant has its scope as it is."""
    by_values: dict[tuple[str, ...], Scope] = {}
    columns = [_texts(trace, name) or [] for name in [*names, "tenant"]]
    scopes = []
    for values in zip(*columns, strict=True):
        if values not in by_values:
            fields = dict(zip(names, values[:-1], strict=True))
            if values[-1]:
                fields["salt"] = f"tenant/{values[-1]}/{fields.get('salt', '')}"
            by_values[values] = Scope(**fields)
        scopes.append(by_values[values])
    return scopes
