"""`pagecast serve` takes llm-d-inference-sim's options, or says why one means nothing here."""

from pathlib import Path
from typing import Any

import pytest
from pagecast.planner_app.cli import run
from pagecast.planner_app.commands import serve
from pagecast.planner_app.commands.mock_options import REFUSED
from pagecast.planner_app.commands.scenario_options import GivenScenario
from pagecast.planner_app.server.options import ServeOptions, Simulation
from pagecast.sim.core.errors import CannotRunHere

TAKEN = {
    "port": 8123,
    "model": "Qwen/Qwen3-8B",
    "served-model-name": "served",
    "max-model-len": 4096,
    "max-num-seqs": 5,
    "max-waiting-queue-length": 7,
    "mode": "echo",
    "block-size": 32,
    "zmq-endpoint": "tcp://127.0.0.1:5557",
    "event-batch-size": 16,
    "kv-events-replay-endpoint": "tcp://*:5558",
    "data-parallel-size": 2,
    "failure-injection-rate": 10,
    "failure-types": "rate_limit",
    "lora-modules": '{"name": "sql", "path": "/sql"}',
    "max-loras": 2,
    "kv-cache-size": 512,
}


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of which the command would have made replicas."""
    caught: dict[str, Any] = {}

    def replicas(arguments: GivenScenario, server: ServeOptions, pace: Simulation) -> list[Any]:
        caught.update({**arguments.fields, **server.model_dump(), **pace.model_dump()})
        raise CannotRunHere("enough")

    monkeypatch.setattr(serve, "_simulated_replicas", replicas)
    return caught


def simulate(*arguments: object) -> int:
    return run(["serve", "--simulate", *map(str, arguments)])


def test_its_options_are_taken(options: dict[str, Any]) -> None:
    pairs = [part for name, value in TAKEN.items() for part in (f"--{name}", value)]
    assert simulate("--enable-kvcache", *pairs)
    assert (options["num_gpu_blocks"], options["replicas"], options["block_size"]) == (512, 2, 32)
    assert options["kv_events_endpoint"] == "tcp://127.0.0.1:5557"
    assert (options["event_batch_size"], options["max_waiting_queue_length"]) == (16, 7)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_replace_the_scheduler_is_refused_with_the_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    option = f"--{name.replace('_', '-')}"
    assert simulate(option, 100)
    assert f"{option} is not served here: {REFUSED[name]}" in capsys.readouterr().err


def test_a_file_holds_options_and_the_command_line_wins(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 8123\nmax-num-seqs: 5\nlora-modules: [a=/a, b=/b]\n")
    simulate("--config", file, "--port", 8124)
    assert (options["port"], options["max_num_seqs"]) == (8124, 5)
    assert list(options["lora_modules"]) == ["a=/a", "b=/b"]
    file.write_text(
        "data-parallel-size: 2\nzmq_endpoint: tcp://127.0.0.1:5557\nnum-gpu-blocks-override: 512\n"
        "no-enable-prefix-caching: true\n"
    )
    simulate("--config", file)
    assert (options["replicas"], options["kv_events_endpoint"]) == (2, "tcp://127.0.0.1:5557")
    assert (options["num_gpu_blocks"], options["enable_prefix_caching"]) == (512, False)
    file.write_text("replicas: 2\ndata-parallel-size: 3\n")
    assert simulate("--config", file)
    assert "'data-parallel-size' says again what another entry says" in capsys.readouterr().err
    file.write_text('no-enable-prefix-caching: "true"\n')
    assert simulate("--config", file)
    assert "no-enable-prefix-caching: 'true' is neither true nor false" in capsys.readouterr().err
    file.write_text("prot: 8123\n")
    assert simulate("--config", file)
    assert "'prot' is no option of `pagecast serve`" in capsys.readouterr().err
    assert simulate("--kv-cache-size", 8, "--num-gpu-blocks", 9)
    assert "give one of them" in capsys.readouterr().err


def test_every_option_of_the_server_comes_from_the_command_line(options: dict[str, Any]) -> None:
    """One that nobody can give would be one that nobody has tried together with the API key."""
    simulate()
    python_only = {"model", "seed", "record_segment_bytes"}
    assert set(ServeOptions.flat_fields()) == set(ServeOptions.model_fields) - python_only
    assert set(ServeOptions.flat_fields()) <= options.keys()
