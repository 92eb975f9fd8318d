"""A scenario file says what it means, or is refused."""

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario


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
