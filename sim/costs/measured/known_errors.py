"""Errors of forecasts by composed costs on public runs, by kind of run.

Runs are alike that share engine, kind of model, family of GPUs and how the model is spread. Of a kind with
at least `FEWEST` runs the error is known that nine in ten stayed within; of others nothing is known.
Source: the teaching half of tests/benchmarks/public_truth_errors.csv, which `public_truth.py` writes there
with the lines below and says how many of the judging half stay within; and public_runs_errors.csv, the runs
of docs/measured-operations.md that fitted nothing and are not saturated.
"""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.costs.measured.operations import Operations

FEWEST = 5
FAMILIES = {
    "Hopper": ("H100", "H200", "GH200", "H20"),
    "Blackwell": ("B200", "B300", "GB200", "GB300"),
}


class Like(NamedTuple):
    """What runs share that are alike."""

    engine: str
    kind: str
    family: str
    spread: str


class Known(NamedTuple):
    """Of how many runs an error is known, and what nine in ten stayed within, in percent."""

    runs: int
    tpot: int
    ttft: int


KNOWN: dict[Like, Known] = {
    Like("trtllm", "dense", "Blackwell", "tensor parallel"): Known(9, 13, 72),
    Like("trtllm", "dense", "Hopper", "tensor parallel"): Known(9, 10, 62),
    Like("trtllm", "mixture of experts, windows", "Blackwell", "tensor parallel"): Known(8, 19, 27),
    Like("trtllm", "mixture of experts, windows", "Hopper", "tensor parallel"): Known(9, 38, 60),
    Like("vllm", "dense", "Blackwell", "tensor parallel"): Known(9, 42, 24),
    Like("vllm", "dense", "Hopper", "one GPU"): Known(12, 19, 16),
    Like("vllm", "dense", "Hopper", "tensor parallel"): Known(27, 10, 30),
    Like("vllm", "mixture of experts", "Blackwell", "tensor parallel"): Known(12, 12, 116),
    Like("vllm", "mixture of experts", "Hopper", "tensor parallel"): Known(9, 36, 51),
    Like("vllm", "mixture of experts, windows", "Blackwell", "tensor parallel"): Known(9, 56, 60),
    Like("vllm", "mixture of experts, windows", "Hopper", "tensor parallel"): Known(18, 16, 37),
}


def like_of(operations: Operations) -> Like:
    """The kind of runs that composed costs are for."""
    model, name = operations.model, operations.gpu.name
    kind = "dense" if model.moe is None else "mixture of experts"
    if operations.delta:
        kind += ", recurrent layers"
    elif operations.latent:
        kind += ", sparse attention" if model.attention.indexer else ", latent attention"
    elif operations.windowed:
        kind += ", windows"
    family = next((key for key, names in FAMILIES.items() if name.split()[0] in names), name)
    spread = (
        "experts over GPUs" if operations.ep > 1 else "tensor parallel" if operations.tp > 1 else "one GPU"
    )
    return Like(operations.table.engine, kind, family, spread)
