"""Cache policy: how a replica's cache is run otherwise than by its engine's own rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import choice, option

if TYPE_CHECKING:
    from pagecast.sim.core.retention import Retention

Victim = Literal["newest", "least-progress", "lowest-priority"]


def _read_retention(text: str) -> Retention:
    from pagecast.sim.core.retention import Retention

    return Retention.parse(text)


@dataclass(frozen=True)
class Lru:
    """The least recently used content is evicted first: the profile's own order."""


@dataclass(frozen=True)
class ByPriority:
    """Content of the lowest retention priority is evicted first."""

    retention: Retention | None = option(
        "with priority, for requests whose trace says nothing: START-END:PRIORITY[:SECONDS] of "
        "prompt tokens and decode:PRIORITY[:SECONDS], with spaces between; priorities 0 to 100 (default: 35)",
        None,
        read=_read_retention,
    )


@dataclass(frozen=True)
class Slru:
    """Segmented: content that was reused is protected, in at most `protected_share` of the blocks."""

    protected_share: float = option(
        "with slru, most of the blocks that reused content is protected in",
        0.8,
        flat="eviction_protected",
        gt=0,
        le=1,
    )


@dataclass(frozen=True)
class Lfu:
    """The least frequently used content is evicted first."""


@dataclass(frozen=True)
class Fifo:
    """The oldest content is evicted first."""


@dataclass(frozen=True)
class CostAware:
    """Content that is cheapest to lose is evicted first.

    `prefix_cap`: of all blocks, the most that one prefix owns.
    """

    prefix_cap: float = option(
        "with cost, most of the blocks that one prefix may own", 0.5, flat="eviction_prefix_cap", gt=0, le=1
    )


Eviction = Lru | ByPriority | Slru | Lfu | Fifo | CostAware
EVICTIONS: dict[str, type[Eviction]] = {
    "lru": Lru,
    "priority": ByPriority,
    "slru": Slru,
    "lfu": Lfu,
    "fifo": Fifo,
    "cost": CostAware,
}


@dataclass(frozen=True)
class ForPrompt:
    """A request is admitted where the blocks of its prompt are free: the profile's own rule."""


@dataclass(frozen=True)
class ForCompletion:
    """A request is admitted where its blocks to the end fit beside those of the running ones."""


@dataclass(frozen=True)
class ForExpected:
    """Blocks are reserved for a quantile of the trace's output lengths."""

    quantile: float = option(
        "with expected, the quantile of the trace's outputs to reserve for",
        0.9,
        flat="admission_quantile",
        gt=0,
        le=1,
    )

    def output(self, outputs: Sequence[int]) -> int:
        """The output length to reserve for; the next one above the quantile. Errors: BadInput without any."""
        ordered = sorted(outputs)
        if not ordered:
            raise _needs_outputs("expected")
        return ordered[min(int(self.quantile * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True)
class ForMaximum:
    """Blocks are reserved for the longest output: `tokens`, or the trace's longest."""

    tokens: int | None = option(
        "with maximum, the output to reserve for (default: the trace's longest)",
        None,
        flat="max_output_tokens",
        ge=1,
    )

    def output(self, outputs: Sequence[int]) -> int:
        """The output length to reserve for. Errors: BadInput where nothing says it."""
        if self.tokens is not None:
            return self.tokens
        if not outputs:
            raise _needs_outputs("maximum")
        return max(outputs)


def _needs_outputs(word: str) -> BadInput:
    return BadInput(f"admission {word} needs the output lengths of a trace; choose another here")


Admission = ForPrompt | ForCompletion | ForExpected | ForMaximum
ADMISSIONS: dict[str, type[Admission]] = {
    "prompt": ForPrompt,
    "completion": ForCompletion,
    "expected": ForExpected,
    "maximum": ForMaximum,
}


def watermarks_of(text: str) -> tuple[float, float]:
    """Reads `LOW:HIGH`. Errors: BadInput."""
    low, colon, high = text.partition(":")
    try:
        marks = float(low), float(high)
    except ValueError:
        marks = (1.0, 0.0)
    if not colon or not 0 < marks[0] <= marks[1] <= 1:
        raise BadInput(f"watermarks {text!r}: write LOW:HIGH, shares of the blocks with 0 < LOW <= HIGH <= 1")
    return marks


def watermarks_text(marks: tuple[float, float]) -> str:
    """The text that `watermarks_of` reads."""
    return ":".join(map(str, marks))


@dataclass(frozen=True)
class CachePolicy:
    """Rules that replace those of a profile; with the defaults it stays what it is.

    `watermarks`: the shares of all blocks, low and high, between which admission stops and starts.
    `shed_ttft_s`: the predicted TTFT above which a request is rejected. `victim` None: the profile's.
    """

    eviction: Eviction = choice(
        "cached content evicted first: least recently used (lru, segmented: slru) or frequently "
        "used (lfu), oldest (fifo), of the lowest retention priority (priority), or cheapest to lose (cost: "
        "prefill time times probability of reuse)",
        EVICTIONS,
    )
    admission: Admission = choice(
        "blocks that a request must find free to be admitted: of its prompt (vLLM), to its "
        "completion, for an expected output, or for the longest",
        ADMISSIONS,
    )
    watermarks: tuple[float, float] | None = option(
        "LOW:HIGH shares of blocks in use: admission stops above HIGH and goes on below LOW",
        None,
        read=watermarks_of,
        write=watermarks_text,
    )
    shed_ttft_s: float | None = option(
        "reject requests on arrival whose predicted TTFT is above so many seconds", None, gt=0
    )
    victim: Victim | None = option(
        "who is preempted when blocks run out (default: the profile's; vLLM: newest)",
        None,
        flat="preemption_victim",
    )

    @property
    def retention(self) -> Retention | None:
        """The retention of requests that ask for none; None where no content has a priority."""
        return self.eviction.retention if isinstance(self.eviction, ByPriority) else None
