"""Loads as load tools give them: how many requests of which lengths, what they share, and when they are sent.

    Load(input_len="1024", output_len="512", concurrency=64).trace(seed=0)
    Load(request_rate=5.0, max_tokens="4x").sent(read("chat"), seed=0)

Lengths, order and times are those of `vllm bench serve` at the same seed: of its `random` data set, of the
order of its `prefix_repetition` data set, and of its `get_request`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from math import ceil, floor, inf
from random import Random
from typing import Any, Literal

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import option
from pagecast.traces.arrays import Ints
from pagecast.traces.arrivals import MAX_ARRIVALS
from pagecast.traces.generate import Conversations, conversations, two_spans
from pagecast.traces.lengths import HELP, ConstantLength, Law, Uniform, parse, tokens
from pagecast.traces.operations import columns_of, in_turn, repeat, select
from pagecast.traces.pace import Pace
from pagecast.traces.schema import Concurrency, Trace, table
from pagecast.traces.seeds import checked_seed

_REQUESTS, _FOR_EACH = 1000, 10  # made requests, in all and for each that may be under way
_MOST_TOKENS = 1 << 40  # of a conversation


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load. All fields are optional; lengths are numbers or laws (`lengths.parse`).

    A load that names lengths, prefixes or turns makes requests (`makes`); the others are of any trace's
    requests. Errors: BadInput for fields that contradict each other.
    """

    num_prompts: int | None = option(
        "requests, or with turns conversations [1000, or 10 for each of the concurrency where that is more]; "
        "of a trace, the first so many",
        None,
        ge=1,
        le=MAX_ARRIVALS,
    )
    input_len: str | None = option(
        f"prompt tokens beside a prefix, and of each turn: a number, or {HELP} [1024]", None, form=int
    )
    output_len: str | None = option("generated tokens, written likewise [128]", None, form=int)
    range_ratio: str | None = option(
        'lengths that are numbers L become uniform from L(1-R) to L(1+R); or {"input": R, "output": R}',
        None,
        form=float,
    )
    prefix_len: int | None = option("tokens of a shared prefix, before the prompt's own", None, ge=1)
    num_prefixes: int | None = option("different prefixes, with as many requests each [1]", None, ge=1)
    distinct_prompts: int | None = option("different prompts, which are sent over and over", None, ge=1)
    turns: str | None = option("turns of a conversation, written like a length", None, form=int)
    turn_delay: str | None = option(
        "seconds between an answer and the next turn, likewise [0]", None, form=float
    )
    request_rate: float | None = option(
        "requests per second, inf: all at once [inf; without a concurrency, a trace's own times]",
        None,
        gt=0,
        le=inf,
    )
    burstiness: float | None = option(
        "shape of the gamma law of times between requests: below 1 in bursts, 1 Poisson, inf constant [1]",
        None,
        gt=0,
        le=inf,
    )
    burst_size: int | None = option("requests that come at once [1]", None, ge=1)
    ramp_up_strategy: Literal["linear", "exponential"] | None = option(
        "how the rate grows from ramp_up_start_rps to ramp_up_end_rps: linear or exponential", None
    )
    ramp_up_start_rps: float | None = option("requests per second at the start", None, gt=0)
    ramp_up_end_rps: float | None = option("requests per second at the end", None, gt=0)
    concurrency: int | None = option(
        "most requests, or sessions, under way at a time: the next is sent when one ends", None, ge=1
    )
    concurrency_ramp: float | None = option("seconds until the concurrency is reached [0]", None, ge=0)
    max_tokens: str | None = option(
        "most tokens that a request may generate, for which engines reserve: a length, or 4x for four times "
        "its output [its output]",
        None,
        form=int,
    )
    repeat_prompts: int | None = option(
        "send all so many times over, each time when all have ended; the last is measured [1]", None, ge=1
    )
    warmup: int | None = option("copies of the first request that are sent before measuring [0]", None, ge=0)

    def __post_init__(self) -> None:
        self._need("burstiness", "request_rate", "ramp_up_strategy")
        self._need("burst_size", "request_rate", "ramp_up_strategy")
        self._need("concurrency_ramp", "concurrency")
        self._need("num_prefixes", "prefix_len")
        self._need("turn_delay", "turns")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None and ends != (None, None):
            raise BadInput("ramp_up_start_rps and ramp_up_end_rps: give ramp_up_strategy as well")
        if self.ramp_up_strategy is not None and (None in ends or self.request_rate is not None):
            raise BadInput(
                "ramp_up_strategy: give ramp_up_start_rps and ramp_up_end_rps, and no request_rate"
            )
        if self.turns is not None and self.distinct_prompts is not None:
            raise BadInput("distinct_prompts is for single requests; leave it or turns out")

    def _need(self, name: str, *needs: str) -> None:
        if getattr(self, name) is not None and all(getattr(self, need) is None for need in needs):
            raise BadInput(f"{name} has no effect without {' or '.join(needs)}: give that as well")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Load:
        """The load of a recipe. Errors: TypeError, ValueError, BadInput."""
        infinite = {name: inf for name, value in given.items() if value == str(inf)}
        return cls(**{**given, **infinite})

    def given(self) -> dict[str, Any]:
        """The fields that are given, ready for JSON."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: str(value) if value == inf else value for name, value in values.items() if value is not None
        }

    @property
    def makes(self) -> bool:
        """Whether it says what requests are like."""
        return any(getattr(self, name) is not None for name in MAKING)

    @property
    def count(self) -> int:
        """How many requests, or conversations, it makes."""
        return self.num_prompts or max(_REQUESTS, _FOR_EACH * (self.concurrency or 0))

    def trace(self, seed: int = 0) -> Trace:
        """Requests made and sent as it says. Errors: BadInput."""
        made = self._conversations(seed) if self.turns is not None else self._requests(seed)
        return replace(self._sent(made, seed), recipe={"make": "load", "seed": seed, "load": self.given()})

    def sent(self, trace: Trace, seed: int = 0) -> Trace:
        """A trace's requests, sent as it says. Errors: BadInput for a load that makes requests of its own."""
        if self.makes:
            name = next(name for name in MAKING if getattr(self, name) is not None)
            raise BadInput(f"{name} makes requests, and a trace has its own: leave {name} or the trace out")
        if not self.given():
            return trace
        recipe = trace.recipe and {
            "make": "sent",
            "seed": seed,
            "load": self.given(),
            "of": dict(trace.recipe),
        }
        return replace(self._sent(trace, seed), recipe=recipe)

    # ---- requests

    def _laws(self) -> tuple[Law, Law]:
        """The laws of input and output lengths."""
        ratios = _ratios(self.range_ratio)
        with _of("input_len"):
            prompts = _around(self.input_len or "1024", ratios[0])
        with _of("output_len"):
            return prompts, _around(self.output_len or "128", ratios[1])

    def _requests(self, seed: int) -> Trace:
        count, prefixes = self.count, self.num_prefixes or 1
        distinct = min(self.distinct_prompts or count, count)
        order = _order(distinct, prefixes, seed)
        rng = np.random.default_rng(checked_seed(seed))
        prompts, answers = self._laws()
        with _of("input_len"):
            inputs = tokens(prompts, distinct, rng)
        with _of("output_len"):
            outputs = tokens(answers, distinct, rng)
        # As by vLLM's tool, those beyond as many for each prefix are not made, unless prompts are sent again.
        number = order[np.arange(count if distinct < count else len(order)) % len(order)]
        prefix, own = self.prefix_len or 0, inputs[number]
        columns = {
            "arrival_s": np.zeros(len(number)),
            "input_tokens": prefix + own,
            "output_tokens": outputs[number],
        }
        trace = Trace(self.name, table(columns), notes=_fewer(count - len(number), prefixes))
        if prefix or distinct < count:
            group = number // (len(order) // prefixes)
            trace = replace(trace, spans=two_spans(group, np.full(len(own), prefix), prefixes + number, own))
        return trace

    def _conversations(self, seed: int) -> Trace:
        prompts, outputs = self._laws()
        systems = (self.prefix_len,) * (self.num_prefixes or 1) if self.prefix_len else ()
        with _of("turns"):
            turns = parse(self.turns or "1")
        with _of("turn_delay"):
            delay = parse(self.turn_delay or "0")
        shape = Conversations(
            Pace(),
            turns,
            prompts,
            outputs,
            delay,
            systems,
            skew=0.0,
            most_tokens=_MOST_TOKENS,
        )
        return conversations(shape, sessions=self.count, seed=seed, name=self.name)

    @property
    def name(self) -> str:
        """A name for its requests."""
        prompt, output = self.input_len or "1024", self.output_len or "128"
        turns = "" if self.turns is None else f", {self.turns} turns"
        return f"{prompt} in, {output} out{turns}"

    # ---- sending

    def _sent(self, trace: Trace, seed: int) -> Trace:
        if not self.makes and self.num_prompts is not None:
            trace = select(trace, np.arange(min(self.num_prompts, len(trace))))
        paced = self.request_rate is not None or self.ramp_up_strategy is not None
        if paced or self.concurrency is not None:
            trace = in_turn(trace)
            first = trace.integers("after") < 0
            arrival = np.full(len(trace), np.nan)
            arrival[first] = self._pace().draw(int(first.sum()), seed)
            trace = replace(trace, requests=table({**columns_of(trace), "arrival_s": arrival}))
        if self.max_tokens is not None:
            with _of("max_tokens"):
                most, raised = _most_tokens(self.max_tokens, trace.integers("output_tokens"), seed)
            columns = table({**columns_of(trace), "max_tokens": most})
            trace = replace(trace, requests=columns, notes=(*trace.notes, *raised))
        if self.concurrency is not None:
            trace = replace(trace, concurrency=Concurrency(self.concurrency, self.concurrency_ramp or 0.0))
        if self.warmup or (self.repeat_prompts or 1) > 1:
            trace = repeat(trace, self.repeat_prompts or 1, self.warmup or 0)
        return trace

    def _pace(self) -> Pace:
        rate = self.ramp_up_start_rps or self.request_rate or inf
        return Pace(
            rate, self.burstiness or 1.0, self.burst_size or 1, self.ramp_up_strategy, self.ramp_up_end_rps
        )


MAKING = (
    "input_len",
    "output_len",
    "range_ratio",
    "prefix_len",
    "num_prefixes",
    "distinct_prompts",
    "turns",
    "turn_delay",
)


def _ratios(text: str | None) -> tuple[float, float]:
    """The range ratios of input and output. Errors: BadInput."""
    try:
        given = json.loads(text or "0")
        both = (given["input"], given["output"]) if isinstance(given, dict) else (given, given)
        ratios = float(both[0]), float(both[1])
    except (KeyError, TypeError, ValueError):
        ratios = -1.0, -1.0
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise BadInput(f'range_ratio {text}: give a number from 0 to below 1, or {{"input": R, "output": R}}')
    return ratios


def _around(text: str, ratio: float) -> Law:
    """The law that a text names; a number with a range ratio is uniform around it.

    Source: vLLM 0.24, benchmarks/datasets/utils.py, `get_sampling_params`. Errors: BadInput.
    """
    law = parse(str(text))
    if not ratio:
        return law
    if not isinstance(law, ConstantLength):
        raise BadInput(
            f"range_ratio is for a length that is a number, and {text} is a law: leave one of them out"
        )
    return Uniform(max(floor(law.value * (1 - ratio)), 1), ceil(law.value * (1 + ratio)))


def _order(count: int, prefixes: int, seed: int) -> Ints:
    """The numbers of requests in the order in which they are sent; those of a prefix have successive numbers.

    Source: vLLM 0.24, benchmarks/datasets/datasets.py, `PrefixRepetitionRandomDataset`. Errors: BadInput.
    """
    if prefixes == 1:
        return np.arange(count)
    if count < prefixes:
        raise BadInput(
            f"num_prefixes is {prefixes}, and there are {count} prompts; give at least one for each"
        )
    order = list(range(count // prefixes * prefixes))
    Random(seed).shuffle(order)
    return np.array(order, dtype=np.int64)


def _fewer(count: int, prefixes: int) -> tuple[str, ...]:
    """A note on prompts that are not made."""
    return (f"{prefixes} prefixes have equally many prompts: {count} fewer are made",) if count else ()


def _most_tokens(text: str, outputs: Ints, seed: int) -> tuple[Ints, tuple[str, ...]]:
    """`max_tokens` of requests of these outputs: at least the output, and a note where that is more.

    Errors: BadInput.
    """
    if not text.endswith(("x", "X")):
        most = tokens(parse(text), len(outputs), np.random.default_rng([seed, 2]))
        less = int((most < outputs).sum())
        note = f"max_tokens is less than the output of {less:,} requests, and counted as their output"
        return np.maximum(most, outputs), (note,) if less else ()
    try:
        factor = float(text[:-1])
    except ValueError:
        factor = 0.0
    if not 1 <= factor < inf:
        raise BadInput(f"{text!r}: give a factor of at least 1, such as 4x, or a length")
    return np.asarray(np.ceil(factor * outputs), dtype=np.int64), ()


@contextmanager
def _of(field: str) -> Iterator[None]:
    """Names the field in errors of the law that it holds."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{field}: {error}") from None
