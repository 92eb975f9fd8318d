"""`pagecast check`: figures that not every draw has, and which way each figure gets worse."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from pagecast.planner_app.cli import run
from pagecast.traces.schema import Trace, table
from pagecast.traces.write import write

REASON = "rejected_reasons.prompt + output tokens exceed max_model_len 16000"


def scenario(folder: Path, check: dict, **fields: object) -> str:
    path = folder / "check.yaml"
    body = {"costs": "roofline", "num_gpu_blocks": 3000, **fields, "check": {"draws": 6, **check}}
    path.write_text(yaml.safe_dump(body))
    return str(path)


def checked(file: str, *arguments: object) -> int:
    return run(["check", "--workers", "1", "--scenario", file, *map(str, arguments)])


def with_long(folder: Path, places: slice) -> str:
    """A request each second, some of them longer than the model takes."""
    prompts = np.full(60, 500)
    prompts[places] = 20_000
    columns = {"arrival_s": np.arange(60.0), "input_tokens": prompts, "output_tokens": np.full(60, 20)}
    write(Trace("long", table(columns)), folder / "long.jsonl")
    return str(folder / "long.jsonl")


def test_a_reason_of_rejection_that_not_every_draw_has_is_compared(tmp_path, capsys):
    check = {"trace": with_long(tmp_path, slice(30, 31)), "regression": {REASON: 0, "ttft_s.p99": 5}}
    file, base = scenario(tmp_path, check, max_model_len=16_000, seed=1), tmp_path / "base"
    assert checked(file, "--write-baseline", base) == 0
    counts = json.loads((base / "baseline.json").read_text())["figures"][REASON]
    assert 0 in counts and sum(counts) > 0
    assert checked(file, "--baseline", base) == 0
    assert "all 2 checks hold" in " ".join(capsys.readouterr().out.split())


def test_a_reason_that_no_draw_of_the_baseline_has_was_none_then(tmp_path, capsys):
    check, base = {"trace": with_long(tmp_path, slice(0, 60, 5))}, tmp_path / "base"
    before = scenario(tmp_path, {**check, "regression": {"rejected": 0}}, max_model_len=32_000)
    assert checked(before, "--write-baseline", base) == 0
    file = scenario(tmp_path, {**check, "regression": {REASON: 0}}, max_model_len=16_000)
    assert checked(file, "--baseline", base, "--json") == 1
    body = capsys.readouterr().out
    finding = json.loads(body[body.index("{") :])["checks"][0]
    assert finding["numbers"]["baseline"] == 0 < finding["numbers"]["value"]


def hits_of(host_gib: int, folder: Path, names: dict[str, float]) -> str:
    return scenario(
        folder,
        {"trace": "chat", "limit": 150, "speedup": 4, "regression": names},
        num_gpu_blocks=1500,
        kv_offloading_size=host_gib,
    )


def test_fewer_hits_in_the_host_are_a_regression_and_more_are_none(tmp_path, capsys):
    names = [
        "offloading.host_hit_rate",
        "offloading.host_hit_tokens",
        "offloading.requests_with_host_hit",
        "prompt_tokens_by_source.host",
    ]
    asked = dict.fromkeys(names, 5)
    for host_gib in (1, 16):
        file = hits_of(host_gib, tmp_path, asked)
        assert checked(file, "--write-baseline", tmp_path / f"{host_gib}") == 0
    assert checked(hits_of(16, tmp_path, asked), "--baseline", tmp_path / "1") == 0
    capsys.readouterr()
    assert checked(hits_of(1, tmp_path, asked), "--baseline", tmp_path / "16", "--json") == 1
    findings = json.loads(capsys.readouterr().out)["checks"]
    assert {finding["name"]: finding["holds"] for finding in findings} == dict.fromkeys(names, False)
    assert all(finding["numbers"]["change_percent"] < -20 for finding in findings)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("offloading.load_bytes", "neither more nor less of offloading.load_bytes is better"),
        ("num_gpu_blocks", "num_gpu_blocks follows from trace and scenario, so that no draw forecasts it"),
        ("requests", "requests follows from trace and scenario, so that no draw forecasts it"),
    ],
)
def test_a_regression_of_a_figure_that_can_not_be_compared_is_refused(name, reason, tmp_path, capsys):
    file = hits_of(1, tmp_path, {name: 5})
    assert checked(file, "--write-baseline", tmp_path / "base") == 2
    assert f"check.regression: {reason}; bound it with check.limits" in capsys.readouterr().err
    assert not (tmp_path / "base").exists()


def test_a_fleets_folder_is_no_baseline(tmp_path, capsys):
    folder, check = tmp_path / "fleet", {"trace": "chat", "limit": 60, "regression": {"ttft_s.p99": 5}}
    options = ["--costs", "roofline", "--num-gpu-blocks", "3000", "--replicas", "2", "--out", str(folder)]
    assert run(["replay", "chat", "--limit", "60", *options]) == 0
    capsys.readouterr()
    assert checked(scenario(tmp_path, check), "--baseline", folder) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "holds the replay of a fleet, and check replays one replica" in err


def busy(folder: Path, **check: object) -> dict[str, object]:
    """The section `check` for a load of twice what the scenario takes."""
    count = 200
    columns = {
        "arrival_s": np.arange(count) / 60,
        "input_tokens": [400] * count,
        "output_tokens": [60] * count,
    }
    write(Trace("busy", table(columns)), folder / "busy.jsonl")
    return {"trace": str(folder / "busy.jsonl"), **check}


SMALL = {"num_gpu_blocks": 400, "max_num_seqs": 8}


def test_shedding_is_a_regression_of_unserved_requests(tmp_path, capsys):
    asked = {"regression": {"ttft_s.p99": 5, "unserved": 0}, "limits": {"unserved": {"max": 10}}}
    base, check = tmp_path / "base", busy(tmp_path, **asked)
    assert checked(scenario(tmp_path, check, **SMALL), "--write-baseline", base) == 0
    assert "leave out" not in capsys.readouterr().out
    file = scenario(tmp_path, check, **SMALL, shed_ttft_s=0.3)
    assert checked(file, "--baseline", base, "--json") == 1
    body = json.loads(capsys.readouterr().out)
    limit, times, lost = body["checks"]
    assert (limit["name"], limit["holds"]) == ("unserved", False)
    assert limit["numbers"]["value"] == body["counts"]["unserved"] > 10
    assert times["holds"] and times["numbers"]["change_percent"] < -20
    assert (lost["name"], lost["holds"], lost["numbers"]["baseline"]) == ("unserved", False, 0)
    (note,) = (note for note in body["notes"] if "leave out" in note)
    assert note.startswith("regressions of ttft_s.p99 leave out unserved requests, ")
    assert note.endswith(
        " per draw and 0 in the baseline: check.slo and a limit or regression of `unserved` count them"
    )


def test_a_limit_of_a_latency_says_how_many_unserved_requests_it_leaves_out(tmp_path, capsys):
    limits = {"ttft_s.p99": {"max": 9}, "tpot_s.p99": {"max": 9}, "queue_s.max": {"max": 9}}
    file = scenario(tmp_path, busy(tmp_path, limits=limits), **SMALL, shed_ttft_s=0.3)
    assert checked(file, "--json") == 0
    body = json.loads(capsys.readouterr().out)
    count = body["counts"]["unserved"]
    expected = (
        f"limits of queue_s.max, ttft_s.p99 leave out {count} unserved requests: check.slo and a limit "
    )
    assert sum(note.startswith(expected) for note in body["notes"]) == 1
    file = scenario(tmp_path, busy(tmp_path, limits={"tpot_s.p99": {"max": 9}}), **SMALL, shed_ttft_s=0.3)
    assert checked(file) == 0
    assert "leave out" not in capsys.readouterr().out


def test_a_baseline_that_counts_no_unserved_requests_is_to_be_written_again(tmp_path, capsys):
    asked, base = {"trace": "chat", "limit": 40, "regression": {"unserved": 0}}, tmp_path / "base"
    file = scenario(tmp_path, asked)
    assert checked(file, "--write-baseline", base) == 0
    baseline = json.loads((base / "baseline.json").read_text())
    del baseline["figures"]["unserved"]
    (base / "baseline.json").write_text(json.dumps(baseline))
    capsys.readouterr()
    assert checked(file, "--baseline", base) == 2
    assert "the baseline has no figure 'unserved'; write it again" in capsys.readouterr().err


@pytest.mark.parametrize(("most", "code"), [(0, 0), (-1, 1)])
def test_a_limit_on_a_reason_is_0_where_nothing_is_rejected_for_it(most, code, tmp_path, capsys):
    asked = {"trace": "chat", "limit": 40, "limits": {REASON: {"max": most}}}
    assert checked(scenario(tmp_path, asked), "--json") == code
    (finding,) = json.loads(capsys.readouterr().out)["checks"]
    assert (finding["name"], finding["value"], finding["holds"]) == (REASON, "0", code == 0)


def test_a_regression_of_a_reason_holds_where_nothing_is_rejected_for_it_any_more(tmp_path, capsys):
    check = {"trace": with_long(tmp_path, slice(0, 60, 5)), "regression": {REASON: 0}}
    base = tmp_path / "base"
    assert checked(scenario(tmp_path, check, max_model_len=16_000), "--write-baseline", base) == 0
    assert checked(scenario(tmp_path, check, max_model_len=32_000), "--baseline", base) == 0
    assert "the only check holds" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("where", ["limits", "regression"])
def test_a_slip_in_a_reason_of_rejection_is_an_error_that_lists_the_reasons(where, tmp_path, capsys):
    name = REASON.replace("exceed", "excede")
    asked = {"trace": "chat", "limit": 40, where: {name: {"max": 0} if where == "limits" else 0}}
    more = ["--write-baseline", tmp_path / "base"] if where == "regression" else []
    file = scenario(tmp_path, asked)
    assert checked(file, *more) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{file}: check.{where}: no request is ever rejected for " in err
    assert "prompt + output tokens exceed max_model_len N; " in err
    assert "predicted TTFT is above N s" in err
