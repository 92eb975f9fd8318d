"""Every option of the engines' own parsers is known, in one class."""

import json
from collections import Counter
from pathlib import Path

import pytest
from pagecast.planner_app.launch.options import TABLES, find, parse, table
from pagecast.planner_app.launch.reading import Reading
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario

# Names of each parser's options, with the first and the last version that was looked at and has them.
RECORDED = json.loads(Path(__file__).with_name("option_names.json").read_text())
COUNTS = {"vllm": 326, "sglang": 531, "trtllm": 32, "trtllm-yaml": 121}


@pytest.mark.parametrize("engine", TABLES)
def test_each_recorded_name_is_in_exactly_one_class(engine):
    recorded = [name for names in RECORDED[engine] for name in names.split()]
    assert len(RECORDED[engine]) == len(table(engine)) == COUNTS[engine]
    for names in RECORDED[engine]:
        found = {find(engine, name, "test")[0] for name in names.split()}
        assert len(found) == 1, names
    own = Counter(name for option in table(engine) for name in option.names)
    assert max(own.values()) == 1
    bare = {name if name.startswith("-") and name[1] != "-" else name.lstrip("-") for name in recorded}
    known = {name.replace("-", "_") if engine == "trtllm" else name for name in own}
    assert known <= bare


@pytest.mark.parametrize("engine", TABLES)
def test_followed_options_name_fields_of_a_scenario(engine):
    fields = {option.detail for option in table(engine) if option.kept == "followed"} - {"-"}
    assert fields <= set(Scenario.flat_fields())
    assert {option.kept for option in table(engine)} == {"followed", "no-effect", "not-modelled"}
    assert not [option for option in table(engine) if option.kept == "no-effect" and option.detail]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--max_num_seqs", "8"], {"max-num-seqs": "8"}),
        (["--max-num-seqs=8"], {"max-num-seqs": "8"}),
        (["-tp", "2", "--trust-remote-code"], {"tensor-parallel-size": "2", "trust-remote-code": True}),
        (["--no-enable-prefix-caching"], {"enable-prefix-caching": False}),
        (["--disable-prefix-caching"], {"enable-prefix-caching": False}),
        (["-O3"], {"optimization-level": "3"}),
        (["--compilation-config.mode", "3"], {"compilation-config": {"mode": 3}}),
        (["--kv-transfer-config.a.b", "x"], {"kv-transfer-config": {"a": {"b": "x"}}}),
        (
            ["--cudagraph-capture-sizes", "1", "2", "--port", "1"],
            {"cudagraph-capture-sizes": ["1", "2"], "port": "1"},
        ),
        (["--seed", "-1"], {"seed": "-1"}),
        (["--tensor-parallel", "2"], {"tensor-parallel-size": "2"}),
    ],
)
def test_a_command_line_is_read_as_vllms_parser_does(words, names):
    given = parse("vllm", ["M", *words], "test")
    assert {option.names[0]: value for option, value in given.values.items()} == names
    assert given.positional == ["M"]


@pytest.mark.parametrize(
    ("engine", "words", "problem"),
    [
        ("vllm", ["--quantisation", "fp8"], "vLLM has no option --quantisation; nearest: --quantization"),
        ("sglang", ["--max-num-seqs", "8"], "SGLang has no option --max-num-seqs"),
        ("trtllm", ["--max_batch", "8"], "TensorRT-LLM has no option --max_batch; nearest: --max-batch-size"),
        ("vllm", ["--max-num-seqs"], "--max-num-seqs has no value"),
        ("vllm", ["--enforce-eager=1"], "--enforce-eager takes no value"),
        ("vllm", ["--max-num", "8"], "has no option --max-num"),
    ],
)
def test_what_the_parser_would_refuse_is_an_error_with_a_hint(engine, words, problem):
    with pytest.raises(BadInput, match=problem):
        parse(engine, words, "serve.sh line 3")


def test_options_without_effect_at_their_defaults_give_no_note():
    quiet = Reading(
        "test", parse("vllm", ["--pipeline-parallel-size", "1", "--dtype", "auto", "--port", "1"], "test")
    )
    quiet.follow()
    assert not quiet.notes
    loud = Reading("test", parse("vllm", ["--stream-interval", "4", "--no-swa-bounded-replay"], "test"))
    loud.follow()
    assert loud.notes == [
        "test: not modelled, though a forecast may depend on it: --no-swa-bounded-replay, --stream-interval 4"
    ]
