"""The command line as a user meets it: JSON keys, exit codes, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pagecast.planner_app import console
from pagecast.planner_app.cli import run

STATISTICS = {"mean", "p50", "p90", "p95", "p99", "max"}
LATENCIES = {
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "queue_s",
    "prefix_lookup_s",
    "prefill_s",
    "decode_s",
    "ttft_cached_s",
    "ttft_uncached_s",
}
FIGURES = {
    "requests",
    "completed",
    "rejected",
    "cancelled",
    "makespan_s",
    "wall_s",
    "steps",
    "input_tokens",
    "output_tokens",
    "output_tokens_per_s",
    "prefill_avoided_s",
    "bytes_per_sequence",
    "eligible_prefix_tokens",
    "reused_prefix_tokens",
    "token_hit_rate",
    "num_gpu_blocks",
    "peak_kv_usage",
    "evicted_blocks",
    "preemptions",
    "failed_allocations",
}


def pagecast(*arguments, capsys):
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_sessions_that_go_on_after_the_last_has_begun_do_not_read_as_overload(capsys):
    """Its own rate counts whole sessions, some of which go on after the last has begun."""
    _, out, _ = pagecast("replay", "chat", "--limit", 40, capsys=capsys)
    place = out.splitlines()[1]
    assert "served all in 13.1 s, the last turn came after 7.42 s" in place and "/s" not in place


def test_replay_prints_one_json_object_and_nothing_else(capsys):
    code, out, err = pagecast("replay", "chat", "--limit", 100, "--json", capsys=capsys)
    assert code == 0
    assert err == ""
    summary = json.loads(out)
    assert summary.keys() >= FIGURES | LATENCIES
    assert all(summary[name].keys() >= STATISTICS for name in LATENCIES)
    assert summary["completed"] == summary["requests"] == 100


def test_replay_shows_the_figures_and_how_far_to_trust_them(capsys):
    code, out, _ = pagecast(
        "replay", "chat", "--limit", 50, "--costs", "roofline", "--explain", capsys=capsys
    )
    assert code == 0
    for word in ("TTFT", "TPOT", "tokens/s", "prefix hits", "KV cache", "preemptions", "note: "):
        assert word in out


def test_vllms_names_work_and_the_last_word_is_the_command_lines(capsys, tmp_path):
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("num_gpu_blocks: 300\nblock_size: 32\n")
    options = ("--scenario", scenario, "--num-gpu-blocks-override", 512, "--limit", 20, "--json")
    code, out, _ = pagecast("replay", "chat", *options, capsys=capsys)
    assert code == 0
    assert json.loads(out)["num_gpu_blocks"] == 512


def test_the_lesser_memory_limit_wins(capsys):
    tail = ("--limit", 20, "--json", "--gpu-memory-utilization", 0.9, "--kv-tokens", 160_000)
    _, out, _ = pagecast("replay", "chat", *tail, capsys=capsys)
    assert json.loads(out)["num_gpu_blocks"] == 10_000


def test_without_prefix_caching_nothing_is_reused(capsys):
    tail = ("--limit", 100, "--json", "--no-enable-prefix-caching")
    _, out, _ = pagecast("replay", "chat", *tail, capsys=capsys)
    assert json.loads(out)["reused_prefix_tokens"] == 0


def test_twice_the_speed_is_half_the_time(capsys, tmp_path):
    path = tmp_path / "slow.csv"
    lines = [f"{second},100,5\n" for second in range(100)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))
    spans = []
    for speedup in (1, 2):
        _, out, _ = pagecast("replay", path, "--speedup", speedup, "--json", capsys=capsys)
        spans.append(json.loads(out)["makespan_s"])
    assert spans[0] == pytest.approx(99, abs=0.2)
    assert spans[1] == pytest.approx(49.5, abs=0.2)
    _, out, _ = pagecast("replay", path, "--rate", 4, "--json", capsys=capsys)
    assert json.loads(out)["makespan_s"] == pytest.approx(99 / 4, abs=0.2)


def test_validate_says_what_matched(shared, capsys):
    folder = shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / "azure_priority_tight"
    code, out, _ = pagecast("validate", folder, "--costs", "recorded", "--json", capsys=capsys)
    assert code == 0
    body = json.loads(out)
    assert body.pop("num_gpu_blocks")["measured"] == 2999
    assert body == {
        "steps_recorded": 5831,
        "steps_matched": 5831,
        "first_mismatch": None,
        "requests": 500,
        "cached_tokens_matched": 500,
        "cut": False,
    }


def test_validate_ends_with_1_where_a_decision_differs(shared, capsys):
    folder = shared / "groundtruth" / "vllm-0.24.0-h200-qwen3-8b" / "mooncake_conv"
    code, out, _ = pagecast("validate", folder, "--profile", "nano-vllm", capsys=capsys)
    assert code == 1
    assert "first difference: step 0" in out


GOOD_LINE = '{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n'
BAD = {
    "cut.jsonl": (GOOD_LINE + '{"timest', "line 2"),
    "negative.jsonl": (GOOD_LINE.replace("5", "-5"), "line 1"),
    "order.jsonl": (
        '{"timestamp": 9, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n'
        '{"timestamp": 1, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n',
        "line 2",
    ),
    "column.csv": ("arrival_s,input_tokens\n0.0,5\n", "hold output tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_trace_is_one_line_that_names_the_place(name, tmp_path, capsys):
    text, words = BAD[name]
    path = tmp_path / name
    path.write_text(text)
    code, out, err = pagecast("replay", path, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert name in err
    assert words in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "Qwen/Qwen9-8B"], "Qwen/Qwen3-8B"),
        (["--gpu", "H300"], "H100"),
        (["--num-gpu-blocks", "0"], "num_gpu_blocks"),
        (["--block-size", "0"], "block_size"),
        (["--speedup", "0"], "--speedup"),
        (["--limit", "0"], "limit"),
        (["--blok-size", "4"], "--block-size"),
        (["--scenario", "nowhere.yaml"], "nowhere.yaml"),
        (["--costs", "h200"], "auto, measured, roofline"),
        (["--tensor-parallel-size", "5"], "5"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
        (["--gpu", "L4", "--model", "meta-llama/Llama-3.1-70B"], "leaves no room"),
        (["--tp", "4"], "No such option: --tp; did you mean --tensor-parallel-size? See"),
        (["-tp", "4"], "No such option: -tp; did you mean --tensor-parallel-size? See"),
        (["--page-size=64"], "did you mean --block-size?"),
        (["--gpu-memory-utilization", "90"], "gpu_memory_utilization is 90.0: give a fraction: 0.9 for 90%"),
        (["--kv-offloading-size", "8GiB"], "--kv-offloading-size is 8GiB: give GiB as a number: 8;"),
        (["--shed-ttft-s=2s"], "--shed-ttft-s is 2s: give a number without a unit"),
    ],
)
def test_a_bad_option_is_one_line_with_a_way_out(options, words, capsys):
    code, out, err = pagecast("replay", "chat", *options, capsys=capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_misspelt_field_is_answered_with_the_nearest(tmp_path, capsys):
    path = tmp_path / "scenario.yaml"
    path.write_text("gpuu: H200\n")
    code, _, err = pagecast("replay", "chat", "--scenario", path, capsys=capsys)
    assert code == 2
    assert err.endswith("field 'gpuu' is not known; did you mean gpu?\n")


def test_options_of_tenants_without_tenants_are_pointed_out(capsys):
    options = ("--tenants", "a:weight=2,blocks=100", "--isolation", "tenant", "--limit", 5)
    _, out, _ = pagecast("replay", "chat", *options, capsys=capsys)
    assert "no column `tenant`, so that --tenants and --isolation tenant change nothing" in out
    _, out, _ = pagecast("replay", "chat", "--limit", 5, capsys=capsys)
    assert "tenant" not in out


def test_another_kind_of_yaml_file_is_no_scenario(capsys):
    workflow = Path(__file__).parents[3] / "examples" / "github-actions.yml"
    for command in (["replay", "chat"], ["check"]):
        code, _, err = pagecast(*command, "--scenario", workflow, capsys=capsys)
        assert code == 2
        assert "field 'name' is not known; is this a scenario?" in err
        assert len(err) < 250


def test_weights_larger_than_the_gpu_are_not_cured_by_a_limit(capsys):
    code, _, err = pagecast("memory", "--model", "meta-llama/Llama-3.1-70B", "--gpu", "H100", capsys=capsys)
    assert code == 2
    assert "its weights take 131.45 GiB on each GPU, which has 79.18 GiB; raise tensor_parallel_size" in err


def test_a_trace_in_place_of_a_recorded_run_is_named_as_such(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,5\n")
    code, _, err = pagecast("validate", path, capsys=capsys)
    assert code == 2
    assert "is a file, not the folder of a recorded run" in err


def test_bad_input_leaves_nothing_half_written(tmp_path, capsys):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5')
    code, *_ = pagecast("replay", path, "--out", tmp_path / "run", capsys=capsys)
    assert code == 2
    assert not (tmp_path / "run").exists()


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m pagecast replay chat --limit 20 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("chat:")


def shell(command, **options):
    command = command.replace("pagecast ", f"{sys.executable} -m pagecast ")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, **options)


@pytest.mark.parametrize("command", ["trace sample", "trace sample --json", "replay chat --limit 20"])
def test_a_reader_that_goes_early_ends_nothing_with_an_error(command):
    done = shell(f"set -o pipefail; pagecast {command} | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_gate_that_fails_says_so_by_its_exit_code_without_a_reader(tmp_path, more):
    gate = "model: Qwen/Qwen3-8B\ngpu: H200\ncheck: {trace: chat, limit: 20, slo: ttft_p99<1us}\n"
    (tmp_path / "gate.yaml").write_text(gate)
    done = shell(f"set -o pipefail; pagecast check --scenario {tmp_path}/gate.yaml {more} | true")
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("where", "words"), [("> /dev/full", "No space left on device"), (">&-", "stdout is closed")]
)
@pytest.mark.parametrize("command", ["trace sample", "trace sample --json", "--help"])
def test_output_that_can_not_be_written_is_one_line(command, where, words):
    done = shell(f"pagecast {command} {where}")
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pagecast.planner_app.commands.replay.replay", interrupted)
    assert pagecast("replay", "chat", "--limit", 5, capsys=capsys) == (130, "", "pagecast: interrupted\n")
    monkeypatch.setattr("pagecast.planner_app.commands.registry.execute", interrupted)
    assert pagecast("--help", capsys=capsys) == (130, "", "pagecast: interrupted\n")


def test_a_command_imports_no_other_commands_modules():
    script = (
        "import sys; from pagecast.planner_app.cli import run; run(sys.argv[1:]); "
        "heavy = {'scipy', 'pandas', 'pagecast.sim.fitting.fit'}; "
        "print(*sorted(heavy.intersection(sys.modules)))"
    )

    def loaded(*arguments):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()[-1]

    assert loaded("--help") == ""
    assert loaded("replay", "chat", "--limit", "5") == "pandas"


def test_what_looks_like_markup_is_printed_as_it_stands(tmp_path, capsys):
    path = tmp_path / "a[bold]b:smile:.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100,5\n")
    code, out, _ = pagecast("replay", path, "--out", tmp_path / "o[", capsys=capsys)
    assert code == 0
    assert out.startswith("a[bold]b:smile:: 1 request, mean prompt 100 tokens")
    assert str(tmp_path / "o[") in out


def test_a_name_of_two_lines_makes_one_line(tmp_path, capsys):
    code, _, err = pagecast("replay", tmp_path / "a\nb\x1b[2J", capsys=capsys)
    assert code == 2
    assert err.count("\n") == 1
    assert "a\\nb\\x1b[2J" in err


def test_a_missing_trace_says_what_to_give(capsys):
    _, _, err = pagecast("replay", capsys=capsys)
    assert err == (
        "pagecast: give a trace (a file, or a sample's name), or requests to make: "
        "--input-len, --output-len\n"
    )


def test_the_folder_of_a_replay_can_be_replayed(tmp_path, capsys):
    options = ("--num-gpu-blocks", 900, "--limit", 50, "--json")
    _, first, _ = pagecast("replay", "chat", *options, "--out", tmp_path / "run", capsys=capsys)
    code, again, _ = pagecast("replay", tmp_path / "run", "--json", capsys=capsys)
    assert code == 0
    assert {**json.loads(again), "wall_s": 0} == {**json.loads(first), "wall_s": 0}
    _, other, _ = pagecast("replay", tmp_path / "run", "--num-gpu-blocks", 800, "--json", capsys=capsys)
    assert json.loads(other)["num_gpu_blocks"] == 800
    scenario = tmp_path / "mine.yaml"
    scenario.write_text("num_gpu_blocks: 700\n")
    _, other, _ = pagecast("replay", tmp_path / "run", "--scenario", scenario, "--json", capsys=capsys)
    assert json.loads(other)["num_gpu_blocks"] == 700


def test_the_parts_of_a_latency_are_shown_and_what_was_refused_why(capsys):
    _, out, _ = pagecast(
        "replay",
        "chat",
        "--max-model-len",
        2000,
        "--tensor-parallel-size",
        2,
        "--scheduling-policy",
        "priority",
        "--session-rate",
        3,
        "--explain",
        capsys=capsys,
    )
    for word in ("queue", "lookup", "prefill", "decode", "over all 2 GPUs"):
        assert word in out
    assert "exceed max_model_len 2000" in out
    assert "note: every request has the same priority" in out
    assert "note: session_rate was not used" in out
    _, out, _ = pagecast(
        "replay", "chat", "--limit", 9, "--no-enable-prefix-caching", "--explain", capsys=capsys
    )
    assert "cached" not in out.split("requests  ")[0]


def test_ttft_with_and_without_a_hit_is_shown_where_enough_requests_can_be_compared(tmp_path, capsys):
    """Pairs of equal prompts, far apart, of which each second is a hit; then the same with five pairs."""
    path = tmp_path / "pairs.jsonl"
    for pairs, shown in ((40, True), (5, False)):
        rows = [
            {
                "timestamp": 4000 * (2 * n + again),
                "input_length": 1024,
                "output_length": 4,
                "hash_ids": [2 * n + 1, 2 * n + 2],
            }
            for n in range(pairs)
            for again in (0, 1)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        _, out, _ = pagecast("replay", path, "--explain", capsys=capsys)
        assert ("TTFT cached" in out and "TTFT uncached" in out) == shown


def test_texts_and_disorder_can_be_replayed(tmp_path, capsys):
    path = tmp_path / "order.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n5,100,5\n0,100,5\n")
    assert pagecast("replay", path, capsys=capsys)[0] == 2
    assert pagecast("replay", path, "--sort", capsys=capsys)[0] == 0


@pytest.mark.parametrize("option", ["--report", "--max-error", "--replicates", "--seed"])
def test_validate_refuses_what_recorded_costs_can_not_use(option, capsys):
    values = {"--report": ["x.html"]}.get(option, ["1"])
    code, _, err = pagecast("validate", "nowhere", option, *values, capsys=capsys)
    assert code == 2
    assert err.startswith(f"pagecast: {option} needs --costs auto or a calibration")


@pytest.mark.parametrize(
    "arguments",
    [
        ("calibrate", "--from-run", "x", "--out", "no/where/x.json"),
        ("validate", "x", "--costs", "auto", "--report", "no/where/x.html"),
        ("trace", "generate", "no/where/x.csv", "--requests", 5),
    ],
)
def test_folders_are_not_made_for_files(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, _, err = pagecast(*arguments, capsys=capsys)
    assert code == 2
    assert "no/where" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [(119.4, "119 s"), (125, "2m05s"), (3580, "59m40s"), (3599.9, "1h00m"), (15614, "4h20m")],
)
def test_durations_as_people_read_them(value, text):
    assert console.seconds(value) == text


def test_few_replicates_make_rough_intervals_and_reuse_in_the_draws_stands_beside_the_traces(capsys):
    options = ("chat", "--limit", "80", "--num-gpu-blocks", "700")
    code, out, _ = pagecast("replay", *options, "--replicates", "3", "--explain", capsys=capsys)
    assert code == 0
    assert "Intervals from 3 draws are rough: a 90% interval takes at least 20 draws" in out
    code, out, _ = pagecast("replay", *options, "--replicates", "3", "--json", capsys=capsys)
    body = json.loads(out)
    reused = f"{body['token_hit_rate']:.1%} of eligible prompt tokens are reused in the trace, "
    assert reused in body["intervals"]["workload"]
    assert body["ttft_s"]["low"]["p50"] <= body["ttft_s"]["p50"] <= body["ttft_s"]["high"]["p50"]


def test_replicates_of_a_generated_trace_are_other_seeds_and_the_reader_is_told(tmp_path, capsys):
    path = str(tmp_path / "made.jsonl")
    pagecast("trace", "generate", path, "--requests", "60", capsys=capsys)
    code, out, _ = pagecast("replay", path, "--replicates", "20", "--json", capsys=capsys)
    assert code == 0
    intervals = json.loads(out)["intervals"]
    assert intervals["replicates"] == 20
    assert "same generator with another seed" in intervals["workload"]
    code, out, _ = pagecast("replay", path, "--replicates", "20", "--json", "--fixed-workload", capsys=capsys)
    assert json.loads(out)["intervals"]["workload"] == "as it is"
