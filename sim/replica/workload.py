"""Workloads: what a replica's set-up depends on of the requests that it will serve."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from pagecast.sim.speculation.recorded import RecordedDrafts
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Trace

_ITEM_TOKENS = re.compile(r"\+(\d{1,18})(?:\s|$)")


class Workload(Protocol):
    """What is known of requests before they come.

    `outputs`: their output lengths, for admission that reserves. `lengths`: the tokens of their sequences at
    their ends. `has_tenants`: tenants are told apart. `drafts`: draft tokens that were recorded, which are
    followed; None: none were. `longest_item`: tokens of the longest image or the like; 0: there are none.
    """

    @property
    def outputs(self) -> Sequence[int]: ...

    @property
    def lengths(self) -> Ints: ...

    @property
    def has_tenants(self) -> bool: ...

    @property
    def drafts(self) -> RecordedDrafts | None: ...

    @property
    def longest_item(self) -> int: ...


class TraceWorkload:
    """The workload of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @cached_property
    def outputs(self) -> Sequence[int]:
        outputs: list[int] = self._trace.integers("output_tokens").tolist()
        return outputs

    @cached_property
    def lengths(self) -> Ints:
        table = self._trace.requests
        return (table["input_tokens"] + table["output_tokens"] - 1).to_numpy(np.int64)

    @property
    def has_tenants(self) -> bool:
        return "tenant" in self._trace.requests

    @cached_property
    def drafts(self) -> RecordedDrafts | None:
        return RecordedDrafts.of(self._trace)

    @cached_property
    def longest_item(self) -> int:
        if "multimodal" not in self._trace.requests:
            return 0
        texts = self._trace.requests["multimodal"].tolist()
        return max([int(tokens) for text in texts for tokens in _ITEM_TOKENS.findall(text)], default=0)


class ExpectedWorkload:
    """The workload of a server, which knows a typical request alone."""

    outputs: Sequence[int] = ()
    has_tenants = False
    drafts: RecordedDrafts | None = None
    longest_item = 0

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self.lengths: Ints = np.array([prompt_tokens + output_tokens - 1])
