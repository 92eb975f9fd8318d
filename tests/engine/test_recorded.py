"""Runs that this engine recorded on H200s and an H100 replay in the simulator: every step, hit and event.

Recorded with `pagecast record TRACE --model M --random-weights`: 300 requests of the bundled chat sample
(with their event logs), Mooncake conversations and agent sessions at two loads each, Mooncake conversations
with Qwen3-0.6B, and 120 requests of the rag sample with fp8 weights and fp8 KV. The letter behind "h200"
tells eleven GPUs apart, and "tp2" names two at once.

Those of "h200f" have speculation or a host tier. "ngram-chat": 150 requests of the chat sample at four times
their rate, with n-grams that find nothing. "verify": batches of 1 to 256 requests over contexts of 300 and
2,500 tokens that verify 1, 3 or 5 draft tokens each, or any number up to 5, all random tokens. "host":
questions about documents that take more blocks than the pool has; with n-grams in float32.

Those of "h200m" judge what sweeps with options tell (`sweeps/h200m-qwen3-8b-options`): requests of the Azure
trace with n-grams, and of the chat sample with a host tier behind 4,000 blocks.

Those of "h200n" and "h200o" were recorded on two GPUs of one host with the kernels of the sweeps that the
shipped calibration of Qwen3-8B was fitted to, just before or after these: requests of the Azure trace, of the
chat and rag samples, and Mooncake conversations at two loads.

Those of "h100t" were recorded on an H100 just after its sweep: requests of the Azure
trace (13 per second synchronously, 15 per second asynchronously), the first 919 requests of the chat sample
at three times its rate, requests of the rag sample, and Mooncake conversations.
"""

from pathlib import Path

import numpy as np
import pytest
from pagecast.engine.recording import event_line
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import load
from pagecast.sim.runs.busy_steps import fitted_steps
from pagecast.sim.runs.forecast import forecast
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.transfers import LOAD
from pagecast.sim.runs.validate import DecisionReplay, compare_decisions
from pagecast.sim.speculation.lookup import lookup_of

FOLDER = Path(__file__).parent / "recorded"
EARLIER = FOLDER.parent / "sweeps" / "h200hi-qwen3-8b.json"  # costs of earlier kernels
STEPS = {
    "h200a-qwen3-8b-mooncake-load": (12422, 200),
    "h200a-qwen3-8b-mooncake-overload": (1656, 200),
    "h200a-qwen3-8b-agents-load": (26737, 396),
    "h200a-qwen3-8b-agents-overload": (7101, 307),
    "h200b-qwen3-8b-chat-async": (6487, 300),
    "h200c-qwen3-8b-chat-async": (6561, 300),
    "h200c-qwen3-8b-chat-sync": (6247, 300),
    "h200c-qwen3-8b-mooncake-load": (12585, 200),
    "h200c-qwen3-8b-mooncake-overload": (1690, 200),
    "h200c-qwen3-8b-agents-overload": (7101, 307),
    "h200c-qwen3-0.6b-mooncake": (16486, 200),
    "h200d-qwen3-8b-agents-load": (26710, 396),
    "h200e-qwen3-8b-agents-load": (34016, 512),
    "h200f-qwen3-8b-ngram-chat": (3202, 150),
    "h200f-qwen3-8b-verify-k1": (295, 1390),
    "h200f-qwen3-8b-verify-k3": (295, 1390),
    "h200f-qwen3-8b-verify-k5": (295, 1390),
    "h200f-qwen3-8b-verify-mixed": (295, 1390),
    "h200f-qwen3-8b-host-async": (1437, 160),
    "h200f-qwen3-0.6b-host-ngram": (524, 150),
    "h100t-qwen3-8b-azure-sync": (2395, 357),
    "h100t-qwen3-8b-azure-async": (1653, 143),
    "h100t-qwen3-8b-chat-async": (5512, 919),
    "h100t-qwen3-8b-mooncake-load": (2585, 60),
    "h100t-qwen3-8b-rag-async": (1942, 100),
    "h100u-qwen3-8b-azure-sync": (2347, 357),
    "h100u-qwen3-8b-azure-async": (1644, 143),
    "h100u-qwen3-8b-chat-async": (5498, 919),
    "h100u-qwen3-8b-mooncake-load": (2586, 60),
    "h100u-qwen3-8b-rag-async": (1934, 100),
    "h200g-qwen3-8b-tp2-chat": (8549, 300),
    "h200g-qwen3-8b-tp2-mooncake": (5448, 120),
    "h200j-qwen3-0.6b-fp8-rag": (12997, 120),
    "h200k-qwen3-8b-mooncake-overload": (1903, 200),
    "h200m-qwen3-8b-ngram-azure": (2056, 227),
    "h200m-qwen3-8b-host-chat": (4440, 406),
    "h200n-qwen3-8b-azure-async": (2503, 392),
    "h200n-qwen3-8b-azure-sync": (2634, 363),
    "h200n-qwen3-8b-mooncake-overload": (1089, 120),
    "h200o-qwen3-0.6b-mooncake": (4859, 90),
    "h200o-qwen3-8b-chat-async": (3193, 279),
    "h200o-qwen3-8b-chat-sync": (3011, 279),
    "h200o-qwen3-8b-mooncake-load": (3096, 60),
    "h200o-qwen3-8b-rag-async": (2384, 100),
}
EVENTS = {"h200o-qwen3-8b-chat-async": 8765, "h200o-qwen3-8b-chat-sync": 8765}  # of the others 9,508


def test_every_run_in_the_folder_is_held_here() -> None:
    assert {run.name for run in FOLDER.iterdir()} == set(STEPS)


@pytest.mark.parametrize("name", STEPS)
def test_a_run_recorded_on_the_gpu_is_decided_alike_by_the_simulator(name: str) -> None:
    report = compare_decisions(RecordedRun.load(FOLDER / name))
    steps, requests = STEPS[name]
    assert report.first_mismatch is None
    assert report.steps_matched == report.steps_recorded == steps
    assert report.cached_tokens_matched == report.requests == requests


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("h200") and "-chat-" in name])
def test_its_event_log_is_the_same_line_for_line(name: str) -> None:
    run = RecordedRun.load(FOLDER / name)
    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert replay.scheduler.events is not None
    assert [event_line(event) for event in replay.scheduler.events] == run.events
    assert len(run.events) == EVENTS.get(name, 9508)


@pytest.mark.parametrize(("name", "loads"), [("qwen3-8b-host-async", 75), ("qwen3-0.6b-host-ngram", 105)])
def test_blocks_came_back_from_the_host_at_four_fifths_of_a_plain_copys_rate(name: str, loads: int) -> None:
    """A plain copy of 600 MB from pinned memory ran at 54.7 GB/s on that GPU."""
    run = RecordedRun.load(FOLDER / f"h200f-{name}")
    loaded = [transfer for transfer in run.transfers if transfer.kind == LOAD]
    assert len(loaded) == loads
    seconds = sum(transfer.end_ns - transfer.start_ns for transfer in loaded) / 1e9
    assert sum(transfer.bytes for transfer in loaded) / seconds > 0.8 * 54.7e9
    assert run.meta["usable_blocks"] < run.meta["config"]["kv_offloading"]["cpu_blocks"]


def test_n_grams_that_find_nothing_take_the_host_the_time_that_costs_charge() -> None:
    costs = CalibratedCosts(load(str(EARLIER)))
    run = RecordedRun.load(FOLDER / "h200f-qwen3-8b-ngram-chat")
    numbers, measured = fitted_steps(run)
    rows = []
    for number, took in zip(numbers.tolist(), measured.tolist(), strict=True):
        batch = run.steps.batch(number)
        if not batch.prefill:
            n = batch.decode_n
            costed = costs.decode_line(n).ns(batch.decode_ctx, batch.decode_max) + costs.host_ns(n)
            rows.append((1 / took, n / took, 1 - costed / took))
    assert len(rows) == 3078
    table = np.array(rows)
    step_ns, request_ns = np.linalg.lstsq(table[:, :2], table[:, 2], rcond=None)[0]
    assert abs(step_ns) < 50_000
    assert request_ns == pytest.approx(lookup_of(costs).request_ns, rel=0.1)


def test_a_step_that_verifies_drafts_is_forecast_by_its_chunks() -> None:
    """No verifying step was fitted. Timed as decode steps with more rows they were 33% too short."""
    result = forecast(
        RecordedRun.load(FOLDER / "h200f-qwen3-8b-verify-mixed"), str(EARLIER), replicates=0, workers=1
    )
    errors = {row.name: row.error_percent for row in result.rows}
    assert abs(errors["tpot_s.mean"]) < 10
    assert abs(errors["e2e_s.mean"]) < 5


def test_a_run_with_fp8_weights_and_kv_is_forecast_within_five_percent() -> None:
    """By costs that are fitted to a sweep on another GPU: `pagecast calibrate` with fp8 KV."""
    run = RecordedRun.load(FOLDER / "h200j-qwen3-0.6b-fp8-rag")
    costs = str(FOLDER.parent / "sweeps" / "qwen3-0.6b-fp8.json")
    result = forecast(run, costs, replicates=0, workers=1)
    errors = {row.name: row.error_percent for row in result.rows}
    names = [f"{kind}.{part}" for kind in ("tpot_s", "e2e_s") for part in ("mean", "p50", "p90")]
    assert max(abs(errors[name]) for name in names) < 5
