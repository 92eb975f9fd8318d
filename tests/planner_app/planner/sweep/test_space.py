"""The notation of a space: values, steps, factors; a mistake is refused in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.planner.sweep.space import parse_space
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario


def values(text):
    (knob,) = parse_space([text], Scenario()).knobs
    return knob.values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("block_size=16,32,64", (16, 32, 64)),
        ("block-size=16", (16,)),
        ("gpu_memory_utilization=0.8:0.95:0.05", (0.8, 0.85, 0.9, 0.95)),
        ("gpu_memory_utilization=none,1", (None, 1.0)),
        ("max_num_seqs=32:512:x2", (32, 64, 128, 256, 512)),
        ("max_num_seqs=8, 16:48:16", (8, 16, 32, 48)),
        ("gpu=h100,H200", ("H100 SXM", "H200")),
        ("async_scheduling=on,off,none", (True, False, None)),
        ("kv_cache_dtype=auto,fp8", ("auto", "fp8")),
    ],
)
def test_values_are_read_as_a_scenario_file_would_read_them(text, expected):
    assert values(text) == expected
    assert [type(value) for value in values(text)] == [type(value) for value in expected]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("blok_size=1", "'blok_size'"),
        ("block_size", "NAME=VALUE"),
        ("block_size=", "NAME=VALUE"),
        ("block_size=16,,32", "missing between commas"),
        ("block_size=0", "block_size is 0"),
        ("block_size=big", "block_size is 'big'"),
        ("block_size=16,16", "given twice"),
        ("block_size=64:16:2", "never gets there"),
        ("block_size=1:2:0", "never gets there"),
        ("block_size=1:64:x1", "never gets there"),
        ("block_size=1:64:x", "is no range"),
        ("block_size=1:1000000:1", "more than 1,000 values"),
        ("gpu=H300", "unknown GPU 'H300'"),
        ("model=nobody/nothing", "unknown model"),
        ("engine=vlm", "'vlm'"),
        ("kv_cache_dtype=fp3", "'fp3'"),
    ],
)
def test_what_no_scenario_could_have_is_refused_in_a_line_that_names_it(text, named):
    with pytest.raises(BadInput) as caught:
        parse_space([text], Scenario())
    assert str(caught.value).startswith(f"{text}: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_knob_set_twice_or_without_effect_is_refused():
    with pytest.raises(BadInput, match="set twice"):
        parse_space(["block_size=16", "block_size=32"], Scenario())
    with pytest.raises(BadInput, match="would change nothing"):
        parse_space(["gpu_memory_utilization=0.8,0.9"], Scenario(num_gpu_blocks=100))
    with pytest.raises(BadInput, match="nothing to sweep"):
        parse_space([], Scenario())


def test_a_range_without_a_step_is_for_a_search():
    space = parse_space(["kv_tokens=1000:2000"], Scenario())
    assert space.size is None
    with pytest.raises(BadInput, match="--search"):
        space.grid()


def test_the_last_knob_turns_fastest():
    space = parse_space(["block_size=16,32", "max_num_seqs=1,2"], Scenario())
    assert space.grid() == [
        {"block_size": 16, "max_num_seqs": 1},
        {"block_size": 16, "max_num_seqs": 2},
        {"block_size": 32, "max_num_seqs": 1},
        {"block_size": 32, "max_num_seqs": 2},
    ]


@given(st.integers(1, 200), st.integers(0, 300), st.integers(1, 50))
def test_a_stepped_range_holds_its_start_and_never_passes_its_end(low, more, step):
    steps = values(f"block_size={low}:{low + more}:{step}")
    assert steps == tuple(range(low, low + more + 1, step))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("field", ["model", "kv_tokens"])
@pytest.mark.parametrize("value", ["[" * 50_000, "9" * 5000, "{a: " * 3000, "2020-99-99", "&a [*a]", ".nan"])
def test_a_hostile_value_is_one_line(field, value):
    with pytest.raises(BadInput) as caught:
        parse_space([f"{field}={value}"], Scenario())
    assert "\n" not in str(caught.value)
