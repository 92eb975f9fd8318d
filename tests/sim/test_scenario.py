"""A scenario file says what it means, or is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pagecast.sim.core.cache_policy import CachePolicy, ForMaximum, Slru
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.preemption import Swap
from pagecast.sim.scenario import HostTier, Scenario


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu: H100\ngpu: L4\n", "line 2: field 'gpu' is given twice"),
        ("num_gpu_blocks: true\n", "num_gpu_blocks is True"),
        ('block_size: "32"\n', "block_size is '32'"),
        ("blok_size: 4\n", "field 'blok_size' is not known"),
        ("1: 2\n", "field '1' is not known; is this a scenario?"),
        ("- a\n- b\n", "field: value"),
        ("gpu: [H100\n", "line 2"),
        (
            "num_gpu_blocks: 1000000000000\n",
            "at most 20,000,000 can be simulated: give fewer as num_gpu_blocks",
        ),
        ("seed: -1\n", "scenario.yaml: seed is -1; it must be at least 0"),
        ("watermarks: high\n", "scenario.yaml: watermarks 'high': write LOW:HIGH"),
        (
            "engine: vlm\n",
            "scenario.yaml: engine 'vlm' is not known; choose one of vllm, nano-vllm, sglang,",
        ),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_and_field(tmp_path, text, words):
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        Scenario.load(path).limits()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["pagecast", "vllm", "sglang", "trtllm-static"])
def test_every_engine_that_costs_are_known_of_may_be_named(engine):
    assert Scenario.make({"engine": engine}).target().engine == engine


def test_a_file_gives_back_what_was_saved(tmp_path):
    scenario = Scenario(gpu="L40S", max_num_seqs=64, kv_tokens=1000, async_scheduling=False)
    scenario.save(tmp_path / "scenario.yaml")
    assert Scenario.load(tmp_path / "scenario.yaml") == scenario
    assert Scenario.load(tmp_path / "scenario.yaml", gpu="H100").gpu == "H100"


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ("s3", "must be fs, or a list as JSON"),
        ('[{"type": "obj"}]', "has the type 'obj'; fs is simulated"),
        ('[{"type": "fs", "root": "/x"}]', "has the field 'root'"),
        ('[{"type": "fs"}, {"type": "fs"}]', "it has 2 tiers"),
        ('[{"type": "fs", "n_read_threads": 0}]', "n_read_threads is 0"),
    ],
)
def test_secondary_tiers_that_cannot_be_are_refused(tiers, message):
    with pytest.raises(BadInput, match=message):
        Scenario.make({"kv_offloading_size": 8.0, "secondary_tiers": tiers})


def test_secondary_tiers_may_be_vllms_list():
    tiers = [{"type": "fs", "root_dir": "/cache", "n_read_threads": 8}]
    scenario = Scenario.make({"kv_offloading_size": 8.0, "secondary_tiers": tiers})
    assert scenario.host_tier().disk


TEXTS = {
    "retention": "0-512:80:30 512-:20 decode:10:0.5",
    "tenants": "a:weight=2,blocks=100 b:blocks=7 *:weight=1",
    "watermarks": "0.70:0.9",
    "public_namespaces": "docs  web",
    "speculative_config": "eagle:2:0.7",
    "secondary_tiers": '[{"type": "fs", "root_dir": "/cache"}]',
    "link_faults": "host-load:failing=0.1,factor=3;disk-store:slow=0.2",
}
WRITTEN = {"kv_offloading_size": 8.0, "eviction": "priority", **TEXTS}
SECTIONS = ("cache", "tenancy", "host", "speculation")


def test_texts_are_given_back_as_they_were_written(tmp_path: Path) -> None:
    Scenario(**WRITTEN).save(tmp_path / "scenario.yaml")
    saved = yaml.safe_load((tmp_path / "scenario.yaml").read_text())
    assert {name: saved[name] for name in TEXTS} == TEXTS


def test_a_scenario_may_be_made_of_the_sections_of_another() -> None:
    scenario = Scenario(**WRITTEN)
    sections = {name: getattr(scenario, name) for name in SECTIONS}
    again = Scenario(**sections)
    assert {name: getattr(again, name) for name in SECTIONS} == sections


def test_options_are_sections_in_code() -> None:
    scenario = Scenario(
        eviction="slru", eviction_protected=0.3, admission="maximum", max_output_tokens=9, preemption="swap"
    )
    assert scenario.cache == CachePolicy(Slru(0.3), ForMaximum(9))
    assert scenario.preemption == Swap()
    assert scenario.host is None and scenario.sglang is None
    assert scenario.changed(cache=CachePolicy()).given == {"preemption": "swap"}
    assert scenario.changed(host=HostTier(4.0)).flat()["kv_offloading_size"] == 4.0


def test_what_has_no_effect_now_has_one_once_its_section_is_chosen() -> None:
    scenario = Scenario(eviction_protected=0.3, disk_latency_ms=9.0, kv_offloading_size=4.0)
    assert scenario.without_effect(()) == [
        (["eviction_protected"], "eviction slru"),
        (["disk_latency_ms"], "secondary_tiers"),
    ]
    changed = scenario.changed(eviction="slru", secondary_tiers="fs")
    assert changed.without_effect(()) == []
    assert changed.cache.eviction == Slru(0.3)
    assert changed.host is not None and changed.host.disk is not None
    assert changed.host.disk.latency_ms == 9.0


def test_a_change_is_checked() -> None:
    with pytest.raises(BadInput, match="scenario: block_size is 0"):
        Scenario().changed(block_size=0)
    with pytest.raises(BadInput, match="did you mean max_num_seqs"):
        Scenario().changed(max_num_seq=3)


LATENT = {"model": "deepseek-ai/DeepSeek-V3", "gpu": "B200", "tensor_parallel_size": 8}


def test_gpus_that_share_a_context_hold_so_many_times_the_tokens():
    alone, shared = Scenario(**LATENT), Scenario(**LATENT, decode_context_parallel_size=8)
    assert shared.limits() == replace(
        alone.limits(), block_size=8 * alone.limits().block_size, engine=shared.vllm
    )
    one, eight = alone.budget(), shared.budget()
    assert one is not None and eight is not None
    assert eight.kv_bytes == one.kv_bytes
    assert eight.kv_tokens == 8 * one.kv_tokens
    assert eight.bytes_per_token.theoretical == one.bytes_per_token.theoretical / 8


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({**LATENT, "decode_context_parallel_size": 3}, "3 does not divide tensor_parallel_size 8"),
        (
            {"tensor_parallel_size": 8, "decode_context_parallel_size": 2},
            "tensor_parallel_size of at least 16",
        ),
        (
            {**LATENT, "decode_context_parallel_size": 8, "kv_offloading_size": 8.0},
            "a host tier with decode context parallelism is not simulated",
        ),
        (
            {
                "model": "openai/gpt-oss-120b",
                "tensor_parallel_size": 16,
                "decode_context_parallel_size": 2,
            },
            "whose layers differ, is not simulated",
        ),
    ],
)
def test_ranks_that_cannot_share_a_context_are_refused(options, problem):
    with pytest.raises(BadInput, match=problem):
        Scenario(**options).limits()
