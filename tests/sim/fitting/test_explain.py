"""What explains that a measurement differs from its forecast: causes that were put in are found."""

from dataclasses import replace

import numpy as np
import pytest
from pagecast.sim.costs.calibration.choose import choose
from pagecast.sim.costs.measured.corrections import Corrections, read_corrections
from pagecast.sim.fitting.explain import Explained, Setup, _slower, explain, warmed
from pagecast.sim.fitting.from_bench import corrected
from pagecast.sim.fitting.match import match
from pagecast.sim.replay.token_gaps import longest_gaps_s
from pagecast.sim.runs.bench_results import BenchResults
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.generate import requests
from pagecast.traces.lengths import parse

SETUP = Scenario(model="Qwen/Qwen3-8B", gpu="H100", num_gpu_blocks=9000)


def served(cause: str, size: float = 0.0, *, count: int = 50, rate: float = 6.0) -> BenchResults:
    """Results of requests that were served in SETUP, but for one thing."""
    trace = requests(
        ArrivalProcess("poisson", rate),
        parse("uniform:800-2400"),
        parse("uniform:50-150"),
        count=count,
        seed=1,
    )
    unknown = np.full(count, np.nan)
    asked = BenchResults("served", trace, unknown, unknown)
    setup = Setup(SETUP, SETUP.step_costs(), asked)
    if cause == "host":
        setup = replace(setup, costs=corrected(setup.costs, Corrections("", size / 1e3, 1.0, 1.0)))
    elif cause == "ahead":
        scenario = SETUP.changed(async_scheduling=False)
        setup = replace(setup, scenario=scenario, costs=scenario.step_costs())
    elif cause == "chunk":
        setup = replace(setup, scenario=SETUP.changed(max_num_batched_tokens=int(size)))
    elif cause == "blocks":
        setup = replace(setup, scenario=SETUP.changed(num_gpu_blocks=int(size)))
    elif cause == "client":
        setup = replace(setup, results=replace(asked, client=_slower(None, size)))
    elif cause == "warm":
        setup = replace(setup, results=warmed(asked))
    result = setup.replayed()
    table = result.requests[-count:]
    return replace(
        asked,
        ttft_s=table["ttft_s"].to_numpy(float),
        e2e_s=table["e2e_s"].to_numpy(float),
        longest_gap_s=longest_gaps_s(result)[-count:],
    )


@pytest.mark.parametrize(
    ("cause", "size", "words"),
    [
        ("host", 3.0, "each step takes 3.00 ms more"),
        ("ahead", 1.0, "steps are planned one at a time (--no-async-scheduling)"),
        ("chunk", 1024.0, "steps of 1,024 tokens"),
        ("blocks", 600.0, "KV blocks, not 9,000"),
        ("warm", 1.0, "in the cache before"),
        ("client", 50.0, "adds 50 ms"),
    ],
)
def test_the_cause_that_was_put_in_is_found(cause: str, size: float, words: str) -> None:
    found = explain(served(cause, size), SETUP, SETUP.step_costs())
    assert found.best is not None
    assert found.best.cause == cause
    assert words in found.best.words
    assert found.best.distance < 0.5 * found.distance
    if cause == "blocks":
        assert found.best.size == pytest.approx(size, rel=0.3)


def test_what_needs_no_explanation_gets_none() -> None:
    found = explain(served("nothing"), SETUP, SETUP.step_costs())
    assert found.distance == 0 and found.best is None and found.near == ()
    assert Explained(0.5, ()).best is None


def test_a_match_ends_close_and_its_calibration_is_taken_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAGECAST_CALIBRATIONS", str(tmp_path))
    done: list[int] = []
    found = match(served("host", 3.0), SETUP, "mine", measured={"hit_rate": 0.0}, progress=done.append)
    rows = {row.name: row for row in found.rows}
    before, after = rows["tpot_s.mean"].errors_percent
    assert before is not None and after is not None
    assert before < -15 and abs(after) < 3
    assert rows["hit_rate"].errors_percent == (0.0, 0.0)
    assert done[-1] > done[0]
    found.corrections.save(tmp_path / "mine.json")
    assert read_corrections(tmp_path / "mine.json") == found.corrections
    costs, plain = choose("mine", SETUP.target()), SETUP.step_costs()
    assert costs.name == "mine"
    for longest in (1000, 9000):  # contexts that are even, and such as are not
        more = costs.decode_line(4).ns(12_000, longest) - plain.decode_line(4).ns(12_000, longest)
        assert more == pytest.approx(3_000_000, rel=0.3)


def test_corrections_of_nothing_change_nothing() -> None:
    plain = SETUP.step_costs()
    same = corrected(plain, Corrections("", 0.0, 1.0, 1.0))
    for longest in (1000, 9000):
        assert same.decode_line(4).ns(12_000, longest, 50) == plain.decode_line(4).ns(12_000, longest, 50)
    begun = [each.decode_line(4).steps_begun(12_000, 9000, 10**9, 200) for each in (same, plain)]
    assert begun[0] == begun[1]
