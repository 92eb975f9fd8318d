"""ServeGen's clients send at the rates, and with the lengths, that their parameters say."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.traces.checks import validate
from pagecast.traces.servegen import expected_requests, load_clients, servegen

TRACE = "0,0,0,,0,0\r\n600,0.5,2.0,Gamma,0.25,8.0\r\n1200,1.0,1.0,Weibull,1.0,1.0\r\n"
DATASET = (
    '{"0": {"input_tokens": "{}", "output_tokens": "{}", "reason_ratio": "{}"},'
    ' "600": {"input_tokens": "{10: 0.25, 20: 0.75}", "output_tokens": "{7: 1.0}"}}'
)


def folder(tmp_path: Path, trace: str = TRACE, dataset: str = DATASET) -> Path:
    made = tmp_path / "clients"
    made.mkdir()
    (made / "chunk-3-trace.csv").write_text(trace, newline="")
    (made / "chunk-3-dataset.json").write_text(dataset)
    return made


def test_windows_and_lengths_of_a_client(tmp_path: Path) -> None:
    clients = load_clients(folder(tmp_path))
    assert [client.name for client in clients] == ["chunk-3"]
    assert expected_requests(clients, 600, 1500) == pytest.approx(300 + 300)
    trace = servegen(clients, start_s=600, duration_s=1200, seed=5)
    validate(trace)
    early = (trace.requests["arrival_s"] < 600).sum()
    assert early == pytest.approx(300, abs=150)
    assert len(trace) - early == pytest.approx(600, abs=100)
    assert set(trace.requests["output_tokens"]) == {7}
    assert (trace.requests["input_tokens"] == 20).mean() == pytest.approx(0.75, abs=0.08)
    assert trace.requests.equals(servegen(clients, start_s=600, duration_s=1200, seed=5).requests)


def test_an_archive_is_read_like_a_folder(tmp_path: Path) -> None:
    made = folder(tmp_path)
    with tarfile.open(tmp_path / "clients.tar.gz", "w:gz") as archive:
        archive.add(made, "data/reason")
    assert load_clients(tmp_path / "clients.tar.gz") == load_clients(made)


def test_a_rate_scales_all_clients(tmp_path: Path) -> None:
    clients = load_clients(folder(tmp_path))
    trace = servegen(clients, start_s=600, duration_s=1200, rate=5.0)
    assert len(trace) == pytest.approx(6000, rel=0.15)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"start_s": 0, "duration_s": 600}, "no client sends anything"),
        ({"start_s": 600, "duration_s": 6000}, "cover 0 to 1800 s"),
        ({"start_s": -5, "duration_s": 60}, "cover 0 to 1800 s"),
    ],
)
def test_times_without_requests(tmp_path: Path, options: dict, part: str) -> None:
    with pytest.raises(BadInput, match=part):
        servegen(load_clients(folder(tmp_path)), **options)


@pytest.mark.parametrize(
    ("trace", "dataset", "part"),
    [
        ("0,x,1,Gamma,1,1\n", DATASET, "chunk-3-trace.csv, line 1"),
        ("0,1,1,Zipf,1,1\n", DATASET, "chunk-3-trace.csv, line 1"),
        ("600,1,1,Gamma,1,1\n0,1,1,Gamma,1,1\n", DATASET, "rising order"),
        (TRACE, "{", "chunk-3-dataset.json: expected times"),
        (TRACE, DATASET.replace("7: 1.0", "7; 1.0"), "chunk-3 sends requests but has no lengths"),
        (TRACE, DATASET.replace("7: 1.0", "7: 1.0, x: 2"), "chunk-3-dataset.json: expected times"),
    ],
)
def test_broken_clients(tmp_path: Path, trace: str, dataset: str, part: str) -> None:
    with pytest.raises(BadInput, match=part):
        load_clients(folder(tmp_path, trace, dataset))


def test_a_negative_seed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="seed is -1; it must be at least 0"):
        servegen(load_clients(folder(tmp_path)), start_s=600, duration_s=600, seed=-1)


def test_files_that_hold_no_clients(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no ServeGen clients"):
        load_clients(tmp_path)
    (tmp_path / "x.tar").write_bytes(io.BytesIO(b"not an archive" * 100).getvalue())
    with pytest.raises(BadInput, match="no readable tar"):
        load_clients(tmp_path / "x.tar")


def test_the_published_clients_send_what_their_parameters_say(shared: Path) -> None:
    clients = load_clients(shared / "traces/servegen_reason_deepseek-r1.tar.zst")
    assert len(clients) == 73
    expected = expected_requests(clients, 36_000, 39_600)
    counts = [len(servegen(clients, start_s=36_000, duration_s=3600, seed=seed)) for seed in range(3)]
    assert np.mean(counts) == pytest.approx(expected, rel=0.05)
    # The busiest client, by itself: its rate in each window, and its mean lengths.
    busiest = max(clients, key=lambda client: expected_requests([client], 36_000, 39_600))
    seeds = 10
    made = [servegen([busiest], start_s=36_000, duration_s=3600, seed=seed) for seed in range(seeds)]
    sent = np.mean([np.histogram(one.requests["arrival_s"], 6, (0, 3600))[0] for one in made], axis=0)
    windows = [window for window in busiest.windows if 36_000 <= window.start_s < 39_600]
    for count, window in zip(sent, windows, strict=True):
        rate = window.arrivals.rate * 600
        # A renewal process counts with a standard deviation of about cv * sqrt(mean).
        assert count == pytest.approx(rate, abs=4 * window.arrivals.cv * np.sqrt(rate / seeds))
    trace = made[0]
    _, inputs, outputs = max(lengths for lengths in busiest.lengths if lengths[0] <= 36_000)
    for column, law in (("input_tokens", inputs), ("output_tokens", outputs)):
        mean = np.average(law.values, weights=law.weights)
        assert trace.requests[column].mean() == pytest.approx(mean, rel=0.08)
