"""KV block count of a recorded engine: predicted beside measured.

The expectation comes from the model, the GPU and the engine's options alone (`memory.hbm_budget`), never from
the run. Blocks are those that requests can use: vLLM's own figure has one more, the null block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.shape import model_of
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.graphs import engine_graphs, graph_reserve
from pagecast.sim.machine.memory import BudgetOptions, HbmBudget, hbm_budget
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import limits_of

# No start loses half of what fits: such a run had its blocks set by hand, whether it says so or not.
_SET_BY_HAND = 0.5
_FIXED = ("num_gpu_blocks_override", "num_blocks")  # what a run's configuration may call it


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Usable KV blocks as predicted and as the run had them; `set_by_hand`: the run's own say nothing."""

    predicted: int
    measured: int
    set_by_hand: bool

    @property
    def error_percent(self) -> float | None:
        """Signed; None where the run's blocks were set by hand."""
        return None if self.set_by_hand else 100 * (self.predicted / self.measured - 1)

    def as_dict(self) -> dict[str, Any]:
        """As printed in JSON."""
        return {
            "predicted": self.predicted,
            "measured": self.measured,
            "error_percent": self.error_percent,
            "set_by_hand": self.set_by_hand,
        }


def block_count(run: RecordedRun) -> BlockCount | None:
    """The expectation beside the run's own count; None for a GPU that is not known, or where nothing fits."""
    config, measured = run.meta.get("config", {}), limits_of(run).num_blocks
    try:
        budget = _budget(run)
    except BadInput:
        return None
    predicted = budget.num_gpu_blocks
    if run.meta.get("engine") == "pagecast":
        predicted -= graph_reserve(_graphs(run)) // budget.layout.block_bytes
    fixed = any(config.get(name) is not None for name in _FIXED)
    return BlockCount(predicted, measured, fixed or measured < _SET_BY_HAND * predicted)


def _budget(run: RecordedRun) -> HbmBudget:
    limits, config = limits_of(run), run.meta.get("config", {})
    share = config.get("gpu_memory_utilization")
    own = run.meta.get("engine") == "pagecast"
    options = BudgetOptions.of(
        limits,
        tensor_parallel_size=int(config.get("tensor_parallel_size", 1)),
        gpu_memory_utilization=None if share is None else float(share),
        kv_cache_dtype=str(config.get("kv_cache_dtype") or "auto"),
        # Our own engine compiles nothing, and its graphs are counted apart.
        enforce_eager=own or bool(config.get("enforce_eager", False)),
        model_runner="v2" if own else "auto",
    )
    return hbm_budget(
        model_of(run.meta, f"{run.folder}/meta.json"), find_gpu(str(run.meta.get("gpu"))), options
    )


def _graphs(run: RecordedRun) -> int:
    """How many steps our own engine captured; runs that don't list them had the usual ones of decode."""
    config = run.meta.get("config", {})
    sizes = config.get("cuda_graph_sizes")
    if isinstance(sizes, list):
        return len(sizes) + len(config.get("prompt_graph_sizes") or ())
    return 0 if config.get("enforce_eager") else len(engine_graphs(limits_of(run).max_num_seqs))
