"""Static envelope: the requests that fit at once by arithmetic, without a replay.

A request that runs at a random moment holds its prompt and a part of its output, in whole blocks. Long
outputs run for longer, so a request of the trace counts with the weight of its output tokens, at a uniform
place in its output. Prompt and output length stay together, as in the trace.

The blocks of N such requests have N times the mean, variance and third moment of one. The envelope is the
largest N whose blocks exceed the pool with at most a given probability (Cornish-Fisher quantile), and at
least the number that fits if every request is at its longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from pagecast.planner_app.planner.slo import Latency, Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replica.windows import blocks_per_block
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.chains import Chains
from pagecast.traces.hits import hits
from pagecast.traces.operations import select
from pagecast.traces.schema import Trace

KV_BLOCKS = "KV blocks"  # the limit that memory sets
OVERFLOW = 0.01  # chance that the requests admitted do not fit
_MOST_ROWS = 1 << 27  # numbers of blocks that are counted: one for each that a request ever has
_MOST = 1 << 20  # requests at once, where nothing else bounds them


def binds(limit: str) -> str:
    """The clause that says that a limit binds."""
    return f"{limit} {'bind' if limit == KV_BLOCKS else 'binds'}"


@dataclass(frozen=True, slots=True)
class BlocksInUse:
    """KV blocks of one running request at a random moment, and at its end at most."""

    mean: float
    sd: float
    skew: float
    most: int
    prompt_mean: float

    def admitted(self, pool: int, chance: float, shared: float = 0.0) -> int:
        """How many such requests a pool of `pool` blocks holds, overflowing with at most `chance`.

        `shared`: the part of prompt blocks that another running request holds already, in the mean.
        """
        mean = self.mean - shared * self.prompt_mean
        z = -NormalDist().inv_cdf(chance)
        room = pool - self.sd * self.skew * (z * z - 1) / 6
        root = -z * self.sd + np.sqrt(max(z * z * self.sd**2 + 4 * mean * room, 0.0))
        likely = int((root / (2 * mean)) ** 2) if root > 0 else 0
        return max(likely, pool // self.most)


@dataclass(frozen=True, slots=True)
class Envelope:
    """Requests at once that each limit allows by itself; None where a limit sets no bound. The least binds.

    `hbm` counts every request's blocks as its own. `hbm_shared` subtracts `shared_prompt`, the share of
    prompt blocks that a full cache has from other sessions: running requests share at most these.
    `reused_prompt` is the share of prompt tokens that a full cache has at all, which are not computed.
    `compute` is the largest batch whose mean step keeps the TPOT of the SLO, with the prompt tokens to be
    computed for each output token.
    """

    blocks: BlocksInUse
    pool_blocks: int
    overflow: float
    reused_prompt: float
    shared_prompt: float
    hbm: int
    hbm_shared: int
    batch_size: int
    token_budget: int
    compute: int | None

    @property
    def concurrency(self) -> int:
        """The least of the limits, prefixes shared as far as the cache can."""
        return self.limits[self.binding]

    @property
    def limits(self) -> dict[str, int]:
        """Each limit that sets a bound."""
        limits = {
            KV_BLOCKS: self.hbm_shared,
            "batch size": self.batch_size,
            "token budget": self.token_budget,
        }
        return limits | ({} if self.compute is None else {"compute": self.compute})

    @property
    def binding(self) -> str:
        """The limit that is the least."""
        return min(self.limits, key=self.limits.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "concurrency": self.concurrency,
            "binding": self.binding,
            "limits": self.limits,
            "hbm_without_sharing": self.hbm,
            "pool_blocks": self.pool_blocks,
            "blocks_per_request": {"mean": self.blocks.mean, "sd": self.blocks.sd, "most": self.blocks.most},
            "shared_prompt": self.shared_prompt,
            "reused_prompt": self.reused_prompt,
            "overflow": self.overflow,
        }


def envelope(
    trace: Trace, scenario: Scenario, slo: Slo, *, costs: StepCosts | None = None, overflow: float = OVERFLOW
) -> Envelope:
    """The static envelope of a trace on a server. Errors: BadInput where no KV block fits."""
    size = scenario.block_tokens
    scenario.limits()
    pool = max(int(scenario.blocks() / blocks_per_block(TraceWorkload(trace), scenario)), 1)
    blocks = blocks_in_use(trace, size)
    caching = scenario.enable_prefix_caching
    reused = hits(trace, (pool,), size).capacity[pool] if caching else 0.0
    shared = hits(one_of_each(trace), (pool,), size).capacity[pool] if caching else 0.0
    prompt, output = trace.integers("input_tokens"), trace.integers("output_tokens")
    fresh = float(prompt.mean()) * (1 - reused) / float(output.mean())  # prompt tokens that come with a token
    budget = int(scenario.max_num_batched_tokens / (1 + fresh))
    context = float(np.average(prompt + (output - 1) / 2, weights=output))
    step_s = _mean_step(costs or scenario.step_costs(), context, fresh, scenario.pipelined)
    bounds = [term.bound_s for term in slo.terms if isinstance(term, Latency) and term.latency == "tpot"]
    return Envelope(
        blocks=blocks,
        pool_blocks=pool,
        overflow=overflow,
        reused_prompt=reused,
        shared_prompt=shared,
        hbm=blocks.admitted(pool, overflow),
        hbm_shared=blocks.admitted(pool, overflow, shared),
        batch_size=scenario.max_num_seqs,
        token_budget=max(budget, 1),
        compute=_largest_batch(step_s, min(bounds), scenario.max_num_seqs) if bounds else None,
    )


def blocks_in_use(trace: Trace, block_size: int) -> BlocksInUse:
    """Blocks of a running request at a random moment, weighted by the tokens it generates."""
    prompt, output = trace.integers("input_tokens"), trace.integers("output_tokens")
    # At its token k a request holds prompt + k tokens; those of one number of blocks are counted at once.
    first, last = -(-prompt // block_size), -(-(prompt + output - 1) // block_size)
    counts = (last - first + 1).astype(np.int64)
    if counts.sum() > _MOST_ROWS:
        raise BadInput(f"{trace.name}: its requests fill {counts.sum():,} blocks, too many to be counted")
    row = np.repeat(np.arange(len(trace)), counts)
    block_count = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum((block_count - 1) * block_size + 1, prompt[row])
    end = np.minimum(block_count * block_size, prompt[row] + output[row] - 1)
    weight = (end - begin + 1).astype(np.float64)
    values = block_count.astype(np.float64)
    mean = float(np.average(values, weights=weight))
    variance = float(np.average((values - mean) ** 2, weights=weight))
    third = float(np.average((values - mean) ** 3, weights=weight))
    skew = third / variance**1.5 if variance > 0 else 0.0
    full = np.average(prompt // block_size, weights=output)  # only full blocks are shared
    return BlocksInUse(mean, variance**0.5, skew, int(last.max()), float(full))


def one_of_each(trace: Trace) -> Trace:
    """One request of each session, turns taken in rotation: those of one session never run at once."""
    chain = Chains.of(trace).chain
    order = np.argsort(chain, kind="stable")
    size = np.bincount(chain)
    turn = np.arange(len(size)) % size
    return select(trace, np.sort(order[np.cumsum(size) - size + turn]))


def _mean_step(costs: StepCosts, context: float, fresh: float, pipelined: bool) -> Callable[[int], float]:
    """Seconds of a settled step of `n` requests: a token of each, and the prompt tokens that come with it."""

    def step_s(n: int) -> float:
        chunk = round(n * fresh)
        total = round(n * context)
        if chunk:
            batch = Batch(n, total, round(context), ((chunk, 0),))
            device = max(costs.device_ns(batch), costs.launch_ns(batch))
        else:
            device = costs.decode_line(n).ns(total, round(context))
        host = costs.host_ns(n)
        return 1e-9 * (max(device, host) if pipelined else device + host)

    return step_s


def _largest_batch(step_s: Callable[[int], float], bound_s: float, most: int) -> int:
    """The largest batch whose step stays under the bound, up to twice `most`; at least 1."""
    low, high = 1, min(2 * most, _MOST)
    if step_s(high) <= bound_s:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if step_s(middle) <= bound_s:
            low = middle
        else:
            high = middle
    return low
