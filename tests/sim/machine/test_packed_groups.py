"""Groups of layers and bytes of blocks: those of vLLM's own planning code, and what packing does."""

import json
from pathlib import Path

import pytest
from pagecast.sim.core.group_spec import GroupSpec, KvKind
from pagecast.sim.machine.block_layout import model_layout
from pagecast.sim.machine.drafting import holding_states, with_draft_layers
from pagecast.sim.machine.models import model
from pagecast.sim.machine.packed_groups import Pages, packed_groups

# By vLLM 0.33's planning code on a CPU, one GPU, blocks of 16 tokens (tests/benchmarks/engine_specs.py).
RECORDED = json.loads((Path(__file__).parent / "groups_vllm_0_33.json").read_text())
# The same with the checkpoints' draft layers loaded and three tokens drafted.
DRAFTED = json.loads((Path(__file__).parent / "groups_vllm_0_33_drafts.json").read_text())


@pytest.mark.parametrize(
    ("name", "drafts"), [*((name, 0) for name in RECORDED), *((name, 3) for name in DRAFTED)]
)
def test_hybrid_models_are_grouped_as_vllm_groups_them(name: str, drafts: int) -> None:
    facts, there = model(name), (DRAFTED if drafts else RECORDED)[name]
    if drafts:
        facts = holding_states(with_draft_layers(facts), drafts, 0)
    layout = model_layout(facts, 16, kv_cache_dtype="auto" if facts.attention.compressed else "bf16")
    groups = sorted([spec.kind_name, spec.block_size] for spec in layout.specs)
    assert groups == sorted(there["groups"])
    assert layout.block_bytes == there["block_bytes"]


def test_pages_of_one_bucket_lie_side_by_side() -> None:
    full = GroupSpec(KvKind.LATENT, 16)
    specs, block = packed_groups((Pages(full, 4, 1000), Pages(full, 3, 100)))
    assert specs == (full,) and block == 4 * 1000 + 3 * 100


def test_a_bucket_with_more_repeats_is_split_into_groups_of_about_as_many() -> None:
    full, window = GroupSpec(KvKind.LATENT, 16), GroupSpec(KvKind.WINDOW, 16, 64)
    specs, block = packed_groups((Pages(full, 4, 100), Pages(full, 4, 10), Pages(window, 12, 100)))
    assert specs == (full, window, window, window) and block == 4 * 110
