"""Notes that qualify the figures of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.note import Caution, CautionNote, Note
from pagecast.sim.replay.served import Served
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.recorded import ACCEPTED
from pagecast.traces.schema import Trace

UNCERTAIN_PART = 0.1  # of the KV blocks: a forecast with less certain memory says so
# `num_gpu_blocks` replaces them.
_LIMITS = ("gpu_memory_utilization", "free_gpu_memory_fraction", "kv_tokens")


def notes(trace: Trace, replicas: Sequence[Served], table: pd.DataFrame) -> tuple[str, ...]:
    """Notes on the busiest of the replicas that served `trace`, then what else applies to one of each kind.

    They are those of the trace's reader, of the costs, and on where a scenario leaves what is known. `table`
    has the requests that ended.
    """
    busiest = max(replicas, key=lambda served: served.recorder.request_count)
    spec = busiest.spec
    remarks = [*trace.notes, _warmup(trace), spec.costs.expected_error(), _outside(busiest, table)]
    known = [note for note in (*remarks, *spec_notes(trace, spec, table)) if note]
    kinds = [kind for kind in dict.fromkeys(served.spec for served in replicas) if kind is not spec]
    others = [kind.costs.expected_error() for kind in kinds]
    for kind in kinds:
        others += spec_notes(trace, kind, table)
    return *known, *(note for note in dict.fromkeys(others) if note and note not in known)


def _warmup(trace: Trace) -> Note | None:
    """A note on requests that are in no figure of requests."""
    count = int((trace.integers("warmup") > 0).sum()) if "warmup" in trace.requests else 0
    return Note("warmup", requests=count) if count else None


def _outside(served: Served, table: pd.DataFrame) -> str | None:
    """The note of a replica's costs on what is beyond the range that they are known for."""
    accepted_rows = table[table["state"] != "rejected"]
    context = (
        int((accepted_rows["input_tokens"] + accepted_rows["output_tokens"]).max())
        if len(accepted_rows)
        else 0
    )
    recorder, block_size = served.recorder, served.spec.scenario.block_tokens
    return served.spec.costs.outside(context, recorder.most_tokens, recorder.most_requests, block_size)


def spec_notes(trace: Trace, spec: ReplicaSpec, table: pd.DataFrame) -> tuple[str, ...]:
    """Notes on where a scenario leaves what is known, whatever its costs are."""
    scenario = spec.scenario
    longest = int((table["input_tokens"] + table["output_tokens"]).max())
    texts = [
        _too_long(scenario, longest),
        _windows(spec),
        _context_parallel(scenario),
        *_override(scenario),
        *memory_notes(scenario),
        _speculation(scenario),
        _acceptance(scenario, trace),
        idle_note(trace, scenario),
    ]
    return tuple(note for note in texts if note)


def _too_long(scenario: Scenario, longest: int) -> Note | None:
    most = scenario.facts().max_position
    if scenario.max_model_len <= most or longest <= most:  # longer ones are rejected
        return None
    return Note("beyond_model_length", model=scenario.model, longest_tokens=longest, model_tokens=most)


def _windows(spec: ReplicaSpec) -> Note | None:
    """A note on windows of which only the mean is modelled."""
    if spec.blocks_per_block == 1.0 or spec.limits.groups:
        return None
    return Note("sliding_windows", model=spec.scenario.model, blocks_per_block=spec.blocks_per_block)


def _context_parallel(scenario: Scenario) -> Note | None:
    """A note on step costs, which do not know of decode context parallelism."""
    ranks = scenario.context_ranks
    return Note("context_parallel", ranks=ranks) if ranks > 1 else None


def _speculation(scenario: Scenario) -> Note | None:
    """A note on what a forecast with speculation leaves out."""
    config = scenario.speculation
    if config is None:
        return None
    with_weights = config.method not in ("ngram", "ngram_gpu")
    loaded = scenario.loaded()
    counted = loaded.draft_model is not None or loaded.layers > scenario.facts().layers
    memory = with_weights and not counted and scenario.num_gpu_blocks is None
    return Note("speculation", lookup=config.method == "ngram", drafter_memory=memory)


def _acceptance(scenario: Scenario, trace: Trace) -> Note | None:
    """Nothing says how many draft tokens are accepted, as in a config copied from vLLM's command line."""
    config = scenario.speculation
    if config is None or config.has_acceptance or ACCEPTED in trace.requests:
        return None
    return CautionNote("no_acceptance", method=config.method, drafts=config.num_speculative_tokens)


def idle_note(trace: Trace, *scenarios: Scenario) -> str:
    """One text on all fields that are given and change nothing; empty where there are none.

    Of several scenarios those that change nothing in any of them.
    """
    idle: dict[str, list[str]] = {}  # fields, by what they need
    in_effect: set[str] = set()
    for scenario in scenarios:
        without = scenario.without_effect(trace.requests)
        for names, need in without:
            of_need = idle.setdefault(need, [])
            of_need += [name for name in names if name not in of_need]
        here = {name for names, _ in without for name in names}
        in_effect.update(name for name in scenario.given if name not in here)
    parts = []
    for need, names in idle.items():
        left = [name for name in names if name not in in_effect]
        if left:
            *first, last = left
            listed = f"{', '.join(first)} and {last}" if first else last
            parts.append(f"{listed} {'have' if first else 'has'} no effect without {need}")
    return Caution(f"{'; '.join(parts)}." if parts else "")


def memory_notes(scenario: Scenario) -> Iterator[Note]:
    """Notes where a real start would run out of memory, or may have over 10% more or fewer KV blocks."""
    budget = scenario.budget()
    if budget is None:
        return
    if budget.out_of_memory is not None:
        yield budget.out_of_memory
    if budget.uncertain_blocks > UNCERTAIN_PART * budget.num_gpu_blocks:
        yield Note("memory_uncertain", blocks=budget.num_gpu_blocks, uncertain=budget.uncertain_blocks)


def _override(scenario: Scenario) -> Iterator[Note]:
    """The options that `num_gpu_blocks` replaces, and whether the GPU could hold that many blocks."""
    blocks = scenario.num_gpu_blocks
    if blocks is None:
        return
    unused = tuple(name for name in _LIMITS if getattr(scenario, name) is not None)
    if unused:
        yield Note("blocks_given", blocks=blocks, unused=unused)
    most = most_blocks(scenario)
    if blocks > most:
        yield CautionNote(
            "blocks_beyond_memory",
            blocks=blocks,
            most_blocks=most,
            gpus=scenario.tensor_parallel_size,
            gpu=scenario.gpu,
            model=scenario.model,
        )


def most_blocks(scenario: Scenario) -> int:
    """The blocks that fit where the engine takes the whole GPU; 0 where not even the weights do."""
    whole = dict.fromkeys(_LIMITS) | {"num_gpu_blocks": None, "gpu_memory_utilization": 1.0}
    try:
        budget = scenario.changed(**whole).budget()
    except BadInput:
        return 0
    return 0 if budget is None else budget.num_gpu_blocks
