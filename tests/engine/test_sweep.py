"""The sweep reaches the shapes that costs hang on, is recorded once, and is fitted as any run is."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagecast.engine import sweep_record
from pagecast.engine.parallel.team import EngineFailed
from pagecast.engine.params import SamplingParams
from pagecast.engine.serve import TraceServer
from pagecast.engine.sweep_options import option_segments
from pagecast.engine.sweep_record import record_sweep
from pagecast.engine.sweep_script import Script
from pagecast.engine.sweep_traces import Segment, segments
from pagecast.planner_app.cli import run
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.tier_spec import HostTierSpec
from pagecast.sim.costs.calibration.file import Calibration
from pagecast.sim.fitting.sweep import load_sweep
from pagecast.sim.replay import replay
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions
from pagecast.sim.scenario import Scenario

SMALL = ["--device", "cpu", "--num-gpu-blocks", "48", "--max-num-seqs", "4", "--max-num-batched-tokens", "48"]
GRAPHS = [1, 2, 4, 8, 16, 24, 32]
PROMPT_GRAPHS = [16, 64, 160]


@pytest.fixture(scope="module")
def swept(model_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with c.json, c.html and c.sweep, made by the command from a tiny model on the CPU."""
    pytest.importorskip("plotly", reason="--plot needs the extra `app`")
    folder = tmp_path_factory.mktemp("swept")
    arguments = ["calibrate", "--model", str(model_of("qwen3").folder), "--out", str(folder / "c.json")]
    assert run([*arguments, "--plot", str(folder / "c.html"), "--replicates", "2", "--json", *SMALL]) == 0
    return folder


def test_the_command_records_both_pipeline_depths_and_fits_them(swept: Path) -> None:
    made = Calibration.load(swept / "c.json")
    assert [entry["asynchronous"] for entry in made.provenance["runs"]] == [False, True]
    assert made.made_for["gpu"] == "CPU" and made.made_for["model_shape"]["layers"] == 2
    assert {entry["torch"] for entry in made.provenance["runs"]} == {torch.__version__}
    left_out = {row["run"] for row in made.cross_validation}
    assert left_out == {"decode-sync", "long-sync", "prompts-sync", "mixed-sync", "load-sync"}
    page = (swept / "c.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "Steps with prompts" in page
    assert "https://" not in page


def test_what_is_recorded_is_fitted_again_without_the_engine(
    swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "c.json"
    folder = str(swept / "c.sweep")
    assert run(["calibrate", "--from-run", folder, "--out", str(again), "--replicates", "2"]) == 0
    assert json.loads(again.read_text()) == json.loads((swept / "c.json").read_text())
    assert "…" not in capsys.readouterr().out


def test_an_interrupted_sweep_goes_on_where_it_stopped(swept: Path, model_of: Any, tmp_path: Path) -> None:
    shutil.copytree(swept / "c.sweep", tmp_path / "c.sweep")
    cut = tmp_path / "c.sweep" / "03-mixed-sync"
    cut.rename(cut.with_name("03-mixed-sync.part"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("c.sweep/*/steps.jsonl.gz")}
    arguments = ["calibrate", "--model", str(model_of("qwen3").folder), "--out", str(tmp_path / "c.json")]
    assert run([*arguments, "--replicates", "0", *SMALL]) == 0
    assert not cut.with_name("03-mixed-sync.part").exists()
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("c.sweep/*/steps.jsonl.gz")}
    assert set(after) - {path for path in before if ".part" not in str(path)} == {cut / "steps.jsonl.gz"}
    assert all(after[path] == time for path, time in before.items() if ".part" not in str(path))


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("qwen3", ["--max-num-seqs", "3"], "config.max_num_seqs 4, not 3"),
        ("qwen2", [], "model.model_type 'qwen3', not 'qwen2'"),
    ],
)
def test_steps_of_another_set_up_are_refused(
    family: str, more: list[str], words: str, swept: Path, model_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", "--model", str(model_of(family).folder), "--out", str(swept / "c.json")]
    capsys.readouterr()
    assert run([*arguments, "--json", *SMALL, *more]) == 2
    error = capsys.readouterr().err
    assert words in error and "c.sweep" in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["calibrate", "--model", "Qwen/Qwen3-8B", "--out", str(tmp_path / "c.json")]
    assert run(arguments) == 3
    error = capsys.readouterr().err
    assert "no CUDA GPU here" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_sweep_reaches_the_shapes_that_costs_hang_on() -> None:
    limits = Limits(4000, 16, 32, 1024, 16_000)
    parts = segments(limits, GRAPHS, PROMPT_GRAPHS)
    scenario = Scenario(
        num_gpu_blocks=4000, max_num_seqs=32, max_num_batched_tokens=1024, async_scheduling=False
    )
    results = [replay(part.trace, scenario, fast_forward=False) for part in parts if not part.depth]
    assert all(len(result.requests) == result.requests["e2e_s"].notna().sum() for result in results)
    decodes, mixed, computed = set[int](), [], []
    for result in results:
        steps = result.steps
        prompts = steps["prefill_n"] > 0
        computed.append(steps.loc[prompts, ["decode_n", "prefill_tokens"]].sum(axis=1).to_numpy())
        decodes |= set(steps.loc[~prompts, "decode_n"])
        mixed.append(steps.loc[prompts & (steps["decode_n"] > 0), ["decode_n", "prefill_tokens"]].to_numpy())
    both_sides = {size + more for size in GRAPHS for more in (0, 1) if size + more <= 32}
    assert both_sides <= decodes
    seen = np.concatenate(mixed)
    small = (seen[:, 1] <= 64) & (seen[:, 0] <= 8)
    assert small.sum() > 50 and (seen[:, 1] > 900).sum() > 20
    tokens = np.concatenate(computed)
    assert all(((tokens > low) & (tokens <= high)).sum() > 30 for low, high in pairwise((0, *PROMPT_GRAPHS)))
    assert max(int(result.steps["decode_max"].max()) for result in results) > 15_000


def test_requests_that_decode_together_read_caches_of_their_own() -> None:
    parts = {part.name: part for part in segments(Limits(4000, 16, 32, 1024, 16_000), GRAPHS, PROMPT_GRAPHS)}
    for part in (parts["decode-sync"], parts["long-sync"]):
        spans = part.trace.spans
        assert spans is not None
        groups: dict[int, list[int]] = {}
        for row, after in enumerate(part.trace.integers("after")):
            groups.setdefault(int(after), []).append(spans.row(row)[0][0])
        big = [texts for texts in groups.values() if len(texts) > 1]
        shared = sum(len(set(texts)) != len(texts) for texts in big)
        assert shared <= (0 if part.name.startswith("decode") else 0.2 * len(big) + 6)


def test_segments_are_joined_on_one_clock(swept: Path) -> None:
    sync, ahead = load_sweep(swept / "c.sweep")
    assert (sync.pipeline_depth, ahead.pipeline_depth) == (0, 1)
    parts = [RecordedRun.load(path) for path in sorted((swept / "c.sweep").glob("*-sync"))]
    assert len(sync.steps) == sum(len(part.steps) for part in parts)
    assert len(sync.requests) == sum(len(part.requests) for part in parts)
    assert np.all(np.diff(sync.steps.start_ns) > 0)
    at = len(parts[0].steps)
    assert sync.steps.prefill(at) == parts[1].steps.prefill(0)
    assert sync.steps.sections[sync.steps.section[at]] == "long-sync"
    first = sync.requests["submitted_s"].iloc[len(parts[0].requests)]
    assert sync.steps.end_ns[at - 1] / 1e9 < first < sync.steps.end_ns[at] / 1e9


def test_the_shared_part_of_the_sweep_decodes_behind_one_prefix() -> None:
    parts = {part.name: part for part in segments(Limits(4000, 16, 32, 1024, 16_000), GRAPHS, PROMPT_GRAPHS)}
    scenario = Scenario(num_gpu_blocks=4000, max_num_seqs=32, max_num_batched_tokens=1024)
    costs, counted = scenario.step_costs(), list[int]()
    costs.shared_ns = lambda tokens, requests: counted.append(tokens) or 0  # type: ignore[method-assign,func-returns-value]
    steps = replay(parts["shared-sync"].trace, scenario, costs=costs, fast_forward=False).steps
    # What decodes together has its context before: its prompts leave one token each to compute.
    assert (steps["prefill_tokens"] == steps["prefill_n"]).sum() >= 8
    assert parts["shared-async"].trace.requests["gap_s"].max() == 0.2
    for prefix in (512, 2048):
        assert {prefix * (n - 1) for n in (3, 8, 16, 32)} <= set(counted)


def test_n_grams_and_a_host_tier_are_recorded_beside_the_sweep(
    swept: Path, model_of: Any, tmp_path: Path
) -> None:
    shutil.copytree(swept / "c.sweep", tmp_path / "c.sweep")
    arguments = ["calibrate", "--model", str(model_of("qwen3").folder), "--out", str(tmp_path / "c.json")]
    options = ["--speculative-config", "ngram:3", "--kv-offloading-size", "0.002", "--replicates", "2"]
    assert run([*arguments, *options, *SMALL]) == 0
    made, plain = Calibration.load(tmp_path / "c.json"), Calibration.load(swept / "c.json")
    assert made.curve_ns == plain.curve_ns  # these runs are no part of plain costs
    known = made.options.as_dict()
    assert set(known) == {
        *("lookup_ns", "lookup_prompt_ns", "lookup_sd", "load_bytes_per_s", "store_bytes_per_s"),
        *("offloading_step_ns", "offloading_block_ns"),
    }
    assert [row["run"] for row in made.provenance["runs_with_options"]] == ["host-sync", "ngram-sync"]
    tier = RecordedRun.load(tmp_path / "c.sweep" / "20-host-sync")
    loaded = [transfer.blocks for transfer in tier.transfers if transfer.kind == "load"]
    assert len(loaded) > 20 and sum(loaded) > 48  # more than the cache holds
    drafts = RecordedRun.load(tmp_path / "c.sweep" / "21-ngram-sync")
    chunks = [drafts.steps.prefill(number) for number in range(len(drafts.steps))]
    verifying = [step for step in chunks if any(tokens == 4 for tokens, _ in step)]
    assert len(verifying) > 30
    assert max(sum(tokens == 4 for tokens, _ in step) for step in verifying) == 4
    for recorded in (tier, drafts):
        report = compare_decisions(recorded)
        assert report.ok, report.first_mismatch


# ---- short sweeps, whose engine the test sees


def short_segment(name: str, depth: int) -> Segment:
    """Eight requests, of which some end with the same step."""
    script = Script(name, 128)
    script.group([script.document(20).cut(20) for _ in range(7)], output=3)
    script.fresh(20, 3)
    return Segment(name, depth, script.trace())


@pytest.fixture
def short_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short segments in place of the sweep, and one in place of the rehearsal."""
    both = [short_segment("first-sync", 0), short_segment("second-async", 1)]
    monkeypatch.setattr(sweep_record, "segments", lambda *_: both)
    monkeypatch.setattr(sweep_record, "rehearsal", lambda _: short_segment("rehearsal", 0).trace)


@pytest.fixture
def recorder(model_of: Any, engine_of: Any) -> Callable[..., Any]:
    """Makes engines that can record."""

    def make(**options: Any) -> Any:
        return engine_of(model_of("qwen2").folder, log_events=True, max_model_len=128, **options)

    return make


def serves(engine: Any) -> bool:
    """Whether an engine has nothing left to do and serves a prompt."""
    if engine.loop.busy:
        return False
    (completion,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    return completion.outputs[0].finish_reason == "length"


@pytest.mark.usefixtures("short_sweep")
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, {}, "config.kv_cache_dtype 'fp8', not None"),
        ({}, {"kv_cache_dtype": "fp8"}, "config.kv_cache_dtype None, not 'fp8'"),
    ],
)
def test_a_sweep_does_not_go_on_with_an_option_more_or_less(
    before: dict[str, Any], after: dict[str, Any], words: str, recorder: Callable[..., Any], tmp_path: Path
) -> None:
    first, second = record_sweep(recorder(**before), tmp_path)
    shutil.rmtree(second)
    with pytest.raises(BadInput, match=words):
        record_sweep(recorder(**after), tmp_path)
    assert not second.exists()
    assert record_sweep(recorder(**before), tmp_path) == [first, second]


@pytest.mark.usefixtures("short_sweep")
def test_a_sweep_that_is_interrupted_leaves_the_engine_as_it_was(
    recorder: Callable[..., Any], tmp_path: Path
) -> None:
    engine, calls = recorder(pipeline_depth=1), iter(range(5))

    def interrupt(done: int, total: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record_sweep(engine, tmp_path, interrupt)
    assert engine.limits.pipeline_depth == engine.loop.scheduler.limits.pipeline_depth == 1
    assert serves(engine)
    assert all((path / "meta.json").is_file() for path in record_sweep(engine, tmp_path))


@pytest.mark.usefixtures("short_sweep")
def test_an_engine_that_fails_for_good_is_closed_and_its_error_seen(
    recorder: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps = recorder(), iter(range(12))
    step = engine.loop.step

    def fail() -> bool:
        if next(steps, None) is None:
            raise EngineFailed("a GPU is gone")
        return bool(step())

    def fail_again() -> None:
        raise EngineFailed("the GPU is still gone")

    monkeypatch.setattr(engine.loop, "step", fail)
    monkeypatch.setattr(engine.loop, "drain", fail_again)
    with pytest.raises(EngineFailed, match="a GPU is gone"):
        record_sweep(engine, tmp_path)
    with pytest.raises(BadInput, match="closed"):
        engine.generate([[1]])


def test_an_error_while_a_trace_is_served_leaves_no_request_behind(recorder: Callable[..., Any]) -> None:
    engine, trace = recorder(), short_segment("all", 0).trace
    ends = []

    def fail() -> None:
        ends.append(engine.loop.clock.now())
        if len(ends) == 2:
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        TraceServer(engine, trace, ended=fail).run()
    assert len(ends) == 2
    assert len(TraceServer(engine, trace).run().requests) == len(trace)
    assert serves(engine)


@pytest.mark.usefixtures("short_sweep")
def test_what_lies_in_a_segments_place_is_left_alone_and_found_at_once(
    recorder: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = recorder()
    monkeypatch.setattr(engine.loop, "step", lambda: pytest.fail("something was served in vain"))
    other = tmp_path / "01-second-async" / "notes.txt"
    other.parent.mkdir()
    other.write_text("precious")
    with pytest.raises(BadInput, match="01-second-async: is in the place of a segment"):
        record_sweep(engine, tmp_path)
    assert other.read_text() == "precious"


def test_segments_with_options_have_numbers_of_their_own(
    recorder: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(limits: Limits, drafts: int) -> list[Segment]:
        return [short_segment(part.name, 0) for part in option_segments(limits, drafts)]

    monkeypatch.setattr(sweep_record, "option_segments", short)
    monkeypatch.setattr(sweep_record, "rehearsal", lambda _: short_segment("rehearsal", 0).trace)
    host, drafts = {"kv_offloading_size": 0.002, "pipeline_depth": 0}, {"speculative_config": "ngram:2"}
    for number, options in enumerate((host, drafts, {**host, **drafts})):
        folder = tmp_path / str(number)
        paths = record_sweep(recorder(**options), folder)
        names = {"20-host-sync": host, "21-ngram-sync": drafts}
        assert [path.name for path in paths] == [
            name for name, used in names.items() if used.items() <= options.items()
        ]


@pytest.mark.parametrize("blocks", [40, 400, 1000, 20_000])
def test_a_small_host_tier_gets_documents_that_it_has_room_for(blocks: int) -> None:
    limits = Limits(60_000, 16, max_model_len=40_960, host=HostTierSpec(blocks))
    (part,) = option_segments(limits, 0)
    spans = part.trace.spans
    assert spans is not None
    first = [spans.row(row)[0] for row in range(len(part.trace))]
    documents = {content: length for content, _, length in first}
    assert len(documents) >= 4
    assert 0.5 * 16 * blocks < sum(documents.values()) < 16 * blocks
    assert (part.trace.requests["input_tokens"] > 16).all()
