"""Terms of a step's time, and families of them.

    time of a step = a curve over its tokens + units of each term x the term's coefficient

A `Term` is one effect. One function counts its units in a step, for the fit and for the replay, so that a
replay charges what was fitted. Pure decode steps also have a closed form, the family's `line`: a replay sums
thousands of them at once. A test compares the two on recorded runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pagecast.sim.costs.decode_line import DecodeLine
from pagecast.sim.costs.families.shape import TileShape

Coefficients = Mapping[str, float]  # nanoseconds per unit, by term


class ComputedStep(NamedTuple):
    """One step as terms see it; the first fields are those of `Batch`.

    `tokens` counts all tokens computed. `ungraphed`: it has prompts, and more tokens than any CUDA graph. The
    fit knows more of recorded steps; a replay leaves these fields at 0 and charges such terms by functions of
    their own (`Place`). `since`: steps after the last one with prompts (0: there is none, or this one has
    prompts); that one computed `last` tokens. `shared`: context tokens of its decoding requests that stand in
    another request's blocks too. `arrivals` requests with `arrived_tokens` tokens came before the next step.
    """

    n: int
    ctx: int
    longest: int
    prefill: tuple[tuple[int, int], ...]
    after: int
    tokens: int
    ungraphed: bool
    since: int = 0
    last: int = 0
    shared: float = 0.0
    arrivals: float = 0.0
    arrived_tokens: float = 0.0


Units = Callable[[ComputedStep], float]


class Place(Enum):
    """Where a replay charges a term: with the step's device or host time, or by a function of its own."""

    DEVICE = "device"
    HOST = "host"  # host time, added to the longer of device time and launches
    LAUNCH = "launch"  # kernel launches: a step takes the longer of these and its device time
    ARRIVAL = "arrival"  # host time between steps
    FADING = "fading"  # device time of decode steps after prompts (`StepCosts.warm_ns`)
    SHARING = "sharing"  # device time that shared context saves (`StepCosts.shared_ns`)


@dataclass(frozen=True)
class Term:
    """One effect on a step's time.

    `bind` gives the function that counts the term's units in a step of a set-up. A `needed` term is kept
    whatever the fit says of it.
    """

    name: str
    meaning: str
    bind: Callable[[TileShape], Units]
    place: Place = Place.DEVICE
    needed: bool = False


def _no_warmth(_: Coefficients, __: int) -> float:
    return 0.0


def _no_sharing(_: TileShape, __: Coefficients, ___: int, ____: int) -> float:
    return 0.0


@dataclass(frozen=True)
class KernelFamily:
    """The kernels that an engine runs, as cost terms.

    `line` makes the line of pure decode steps of n requests from `fixed` nanoseconds (all but attention).
    `warm_ns` is what the decode steps after one with so many tokens take more, together; `shared_ns` what so
    many shared context tokens of so many requests save. `single_tokens_decode`: a prompt chunk of one token
    runs as a decode even beside longer chunks. `records_ends`: recordings with asynchronous scheduling have
    the end of each step on the device, and so its own time. `lookup_ns`: host time that n-gram speculation
    takes for each request of a step, to look up draft tokens and lay out a step that verifies them;
    `lookup_prompt_ns`: more in a step with prompts; `lookup_sd`: how far hosts differ in both (of the natural
    logarithm).
    """

    name: str
    terms: tuple[Term, ...]
    line: Callable[[TileShape, Coefficients, int, float], DecodeLine]
    warm_ns: Callable[[Coefficients, int], float] = _no_warmth
    shared_ns: Callable[[TileShape, Coefficients, int, int], float] = _no_sharing
    single_tokens_decode: bool = False
    records_ends: bool = False
    lookup_ns: int = 0
    lookup_prompt_ns: int = 0
    lookup_sd: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its terms."""
        return tuple(term.name for term in self.terms)

    def named(self, *places: Place) -> tuple[str, ...]:
        """Names of the terms that are charged at one of `places`."""
        return tuple(term.name for term in self.terms if term.place in places)

    def term(self, name: str) -> Term:
        """The term of that name; KeyError for others."""
        return next(iter(term for term in self.terms if term.name == name))
