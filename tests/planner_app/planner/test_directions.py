"""Every figure of a replay either gets worse in one direction, or is known not to."""

from dataclasses import replace

import pytest
from pagecast.planner_app.planner.directions import more_is_better
from pagecast.planner_app.planner.sweep.question import COSTS
from pagecast.planner_app.planner.sweep.trial import FIGURES
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.replicates import summary_figures
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read

SCENARIOS = {
    "tiers": {
        "kv_offloading_size": 2,
        "secondary_tiers": "fs",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "max_model_len": 3000,
    },
    "swapping": {"preemption": "swap"},
    "rollout": {"rollout_at_s": 3},
    "partial reuse": {"partial_reuse": "copy"},
    "isolation": {"isolation": "tenant", "isolation_price": True, "scrub_private_blocks": True},
}
NEITHER = {
    "speculation.num_drafts",
    "speculation.num_draft_tokens",
    "speculation.acceptance_rates_per_position",
    *(
        f"offloading.{name}"
        for name in [
            "host_blocks",
            "used_host_blocks",
            "stored_blocks",
            "loaded_blocks",
            "loads",
            "load_bytes",
            "load_busy",
            "stores",
            "store_bytes",
            "store_busy",
            "disk_blocks",
            "promoted_blocks",
            "cascaded_blocks",
            "disk_loads",
            "disk_load_bytes",
            "disk_load_busy",
            "disk_stores",
            "disk_store_bytes",
            "disk_store_busy",
        ]
    ),
    "peak.uncached_tokens_per_s_asked",
    "rollout.at_s",
    "rollout.requests_after",
    "rollout.ttft_p99_without_s",
    "rollout.old_blocks_at_rollout",
    "partial_reuse.copied_blocks",
    "partial_reuse.taken_blocks",
    "tenants.a",
    "tenants.b",
    "isolation.ttft_mean_shared_s",
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_figure_has_a_direction_or_is_known_to_have_none(name):
    trace = read("chat", limit=40)
    if name == "isolation":
        trace = replace(trace, requests=trace.requests.assign(tenant=["a", "b"] * 20))
    scenario = Scenario(costs="roofline", num_gpu_blocks=900, **SCENARIOS[name])
    figures = summary_figures(replay(trace, scenario, kept=Kept(steps=False)))
    assert {figure for figure in figures if more_is_better(figure) is None} <= NEITHER


def test_every_objective_of_a_sweep_has_a_direction():
    assert not [name for name in (*FIGURES, *COSTS) if more_is_better(name) is None]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("output_tokens_per_s", True),
        ("prefill_avoided_s", True),
        ("offloading.host_hit_rate", True),
        ("offloading.requests_with_disk_hit", True),
        ("prompt_tokens_by_source.exact", True),
        ("prompt_tokens_by_source.missed", False),
        ("speculation.acceptance_rate", True),
        ("ttft_s.p99", False),
        ("tpot_s.mean", False),
        ("makespan_s", False),
        ("rejected_reasons.predicted TTFT is above 2 s", False),
        ("offloading.load_wait_s", False),
        ("offloading.load_bytes", None),
        ("wall_s", None),
    ],
)
def test_which_way_figures_get_worse(name, more):
    assert more_is_better(name) is more
