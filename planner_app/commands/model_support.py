"""Support of one model in five lines: its layers, memory, decisions, step costs, and gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import KvKind
from pagecast.sim.costs.calibration.choose import ROOFLINE
from pagecast.sim.costs.calibration.support import CALIBRATED, Support
from pagecast.sim.costs.measured.corrections import MEASURED
from pagecast.sim.costs.roofline import unchecked_percent
from pagecast.sim.machine.architectures import ARCHITECTURES
from pagecast.sim.machine.block_layout import BlockLayout, model_layout
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.machine.model_facts import ModelFacts

_KINDS = {
    KvKind.FULL: "full",
    KvKind.LATENT: "latent",
    KvKind.WINDOW: "window",
    KvKind.CHUNK: "chunk",
    KvKind.STATE: "state",
    KvKind.RING: "ring",
    KvKind.CHECKPOINT: "state",
}
# Of public start-up logs: see docs/models.md.
_START_ERRORS = "KV tokens of 84 public starts within 0.3% in the median, 8% in 90% of them"


def five_lines(facts: ModelFacts, rows: Iterable[Support]) -> list[str]:
    """The lines of one model, whose tiers of step costs are `rows`."""
    return [
        f"model      {_model(facts)}",
        f"memory     {_memory(facts)}",
        f"decisions  {_decisions(facts)}",
        f"costs      {_costs(facts, rows)}",
        f"unknown    {'; '.join(facts.notes) or 'nothing that its configuration says'}",
    ]


def _model(facts: ModelFacts) -> str:
    parts = [
        f"{facts.name}: {facts.model_type}{'' if facts.model_type in ARCHITECTURES else ' (not known)'}",
        f"{facts.params / 1e9:,.2f} B parameters, {facts.active_params / 1e9:,.2f} B active",
        f"most weights in {facts.weight_dtype}",
    ]
    return ", ".join(parts)


def _memory(facts: ModelFacts) -> str:
    source = "the checkpoint's index" if facts.checkpoint_bytes else "its shapes"
    state = f", {facts.state_bytes() / (1 << 20):,.1f} MiB of state a sequence" if facts.recurrent else ""
    dtype = "packed" if facts.attention.compressed else facts.kv_dtype.replace("auto", facts.dtype)
    return (
        f"{facts.weight_bytes() / GIB:,.2f} GiB of weights by {source}, {facts.kv_bytes_per_token():,} bytes "
        f"of KV ({dtype}) a token inside all windows, {_unlimited_bytes(facts):,} beyond{state}; "
        f"{_START_ERRORS}"
    )


def _unlimited_bytes(facts: ModelFacts) -> int:
    """Bytes that a token adds for as long as its sequence lasts."""
    size = facts.kv_element_bytes()
    kept = (group for group in facts.kv_groups() if not group.window)
    return round(sum(group.layers * group.elements_per_token * size + group.index_bytes for group in kept))


def _decisions(facts: ModelFacts) -> str:
    try:
        layout = model_layout(facts, 16)
    except BadInput as error:
        return f"not simulated: {error}"
    plain = "one group of layers" if layout.groups == 1 else f"{layout.groups} groups ({_groups(layout)})"
    kinds = {spec.kind for spec in layout.specs}
    reuse = "prefix reuse as in vLLM"
    if KvKind.RING in kinds:
        reuse = "prefix reuse is not simulated, for its indexer pools keys"
    elif KvKind.STATE in kinds:
        reuse = "prefix reuse at states that were kept, as in vLLM 0.33"
    return f"{plain}, blocks of {layout.block_bytes / (1 << 10):,.0f} KiB as in vLLM 0.33; {reuse}"


def _groups(layout: BlockLayout) -> str:
    counts = Counter((spec.kind, spec.window, spec.block_size) for spec in layout.specs)
    return ", ".join(
        f"{n} {_KINDS[kind]}{f' of {window:,}' if window else ''} in {size:,}s"
        for (kind, window, size), n in counts.items()
    )


def _costs(facts: ModelFacts, rows: Iterable[Support]) -> str:
    if facts.untimed:
        return f"none: steps with {facts.untimed} can't be timed"
    by_tier: dict[str, list[str]] = {}
    width: dict[str, float] = {}
    for row in rows:
        by_tier.setdefault(row.tier, []).append(row.gpu)
        width[row.tier] = max(width.get(row.tier, 0.0), row.half_width_percent or 0.0)
    parts = [
        f"{tier} on {', '.join(by_tier[tier])} (step times within {width[tier]:.0f}%)"
        for tier in (CALIBRATED, MEASURED)
        if tier in by_tier
    ]
    if ROOFLINE in by_tier:
        gpus = ", ".join(by_tier[ROOFLINE])
        parts.append(f"roofline on {gpus} and others (allow {unchecked_percent(facts)}%)")
    return "; ".join(parts) or "none on these GPUs: it can't be sharded so"
