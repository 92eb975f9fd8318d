"""An engine on two devices does what it does on one, and ends with a reason when one is lost."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagecast.engine.options import Options
from pagecast.engine.parallel import peer_memory
from pagecast.engine.parallel.ring import Ring, shared_file
from pagecast.engine.parallel.team import EngineFailed
from pagecast.engine.params import SamplingParams
from pagecast.engine.serve import TraceServer
from pagecast.engine.shard import check_shards
from pagecast.engine.spec import ModelSpec
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.runs.validate import compare_decisions

PROMPTS = [list(range(1, 30)), [5, 6, 7], list(range(40, 100)), [9] * 50]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.8, seed=1),
    SamplingParams(max_tokens=12, temperature=0.9, top_k=20, top_p=0.9, seed=2),
    SamplingParams(max_tokens=12),
]
TIGHT = {"num_blocks": 14, "max_num_seqs": 6, "max_num_batched_tokens": 48}


def tokens(engine: Any) -> list[list[int]]:
    return [output.token_ids for one in engine.generate(PROMPTS, PARAMS) for output in one.outputs]


def finish(engine: Any) -> None:
    while engine.loop.step():
        pass


@pytest.mark.parametrize(
    ("family", "depth", "changes"),
    [
        pytest.param("qwen3", 1, {}, id="qwen3"),
        # A vocabulary that has no halves, and biases that only one of two may add.
        pytest.param("llama", 0, {"vocab_size": 253}, id="llama"),
        pytest.param("mistral", 1, {"num_key_value_heads": 1}, id="one KV head", marks=pytest.mark.slow),
    ],
)
def test_two_devices_are_one_step_by_step(
    family: str,
    depth: int,
    changes: dict[str, Any],
    model_of: Any,
    engine_of: Any,
    small_trace: Any,
    watched: Any,
    core_events: Any,
) -> None:
    folder = model_of(family, **changes).folder
    one = engine_of(folder, pipeline_depth=depth, **TIGHT)
    two = engine_of(folder, pipeline_depth=depth, tensor_parallel_size=2, log_events=True, **TIGHT)
    whole, share = watched(one), watched(two)
    assert tokens(two) == tokens(one)
    assert share.rows.keys() == whole.rows.keys()
    for key, ours in share.rows.items():
        theirs = whole.rows[key][: len(ours)]
        # -inf stands for tokens that are filtered out.
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-4), key
    # All at once: however fast a device is, they do not fit together.
    run = TraceServer(two, small_trace(3, count=20, horizon_s=0.0)).run()
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert core_events(run) == run.events
    assert {"preempted", "reused"} <= {event["kind"] for event in run.events}
    assert run.meta["config"]["tensor_parallel_size"] == 2


@pytest.mark.parametrize(
    "by_expert", [pytest.param(False, id="widths"), pytest.param(True, id="experts", marks=pytest.mark.slow)]
)
def test_mixtures_of_experts_are_shared_out(by_expert: bool, model_of: Any, engine_of: Any) -> None:
    folder = model_of("qwen3_moe").folder
    two = engine_of(folder, tensor_parallel_size=2, enable_expert_parallel=by_expert)
    assert tokens(two) == tokens(engine_of(folder))
    assert two.loaded.model.layers[0].mlp.down.weight.shape == ((3, 64, 48) if by_expert else (6, 64, 24))


@pytest.mark.slow
def test_drafts_are_verified_on_two_devices(model_of: Any, engine_of: Any) -> None:
    folder = model_of("qwen3").folder
    two = engine_of(folder, tensor_parallel_size=2, speculative_config="ngram:3")
    assert tokens(two) == tokens(engine_of(folder))


def test_random_weights_are_shares_of_one_model(model_of: Any, engine_of: Any) -> None:
    folder = model_of("qwen3").folder
    one, two = (engine_of(folder, random_weights=True, tensor_parallel_size=size) for size in (1, 2))
    assert tokens(one) == tokens(two)


def test_a_worker_that_is_killed_ends_the_engine_with_a_reason(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen3").folder, tensor_parallel_size=2)
    (worker,) = engine._team._workers
    engine.submit(engine.encode(PROMPTS[0]), SamplingParams(max_tokens=500, ignore_eos=True))
    for _ in range(3):
        engine.loop.step()
    os.kill(worker.process.pid, signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="worker 1 ended with signal SIGKILL"):
        finish(engine)
    with pytest.raises(EngineFailed, match="worker 1"):
        engine.generate(PROMPTS)
    assert time.monotonic() - begun < 15
    with pytest.raises(BadInput, match="closed"):
        engine.generate(PROMPTS)


def test_an_interrupt_in_a_step_ends_the_engine_of_two(
    model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model_of("qwen3").folder, tensor_parallel_size=2)
    (worker,) = engine._team._workers

    def interrupted(batch: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.loop.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS)
    assert worker.process.returncode is not None
    with pytest.raises(BadInput, match="the engine is closed; make a new one"):
        engine.generate(PROMPTS)


def test_a_second_engine_of_two_is_refused_for_what_it_is(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen3").folder, tensor_parallel_size=2)
    with pytest.raises(
        CannotRunHere, match=r"^this process has a torch\.distributed group already"
    ) as caught:
        engine_of(model_of("qwen3").folder, tensor_parallel_size=2)
    assert not isinstance(caught.value, EngineFailed)
    assert len(tokens(engine)) == len(PROMPTS)


class FakeRuntime:
    """A CUDA runtime that notes what is held; the call named `failing` fails."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.held: set[int] = set()
        self.errors = 0

    def _give(self, name: str, pointer: Any, address: int) -> int:
        if name == self.failing:
            self.errors += 1
            return 1
        pointer._obj.value = address
        self.held.add(address)
        return 0

    def cudaMalloc(self, pointer: Any, size: Any) -> int:
        return self._give("cudaMalloc", pointer, 100)

    def cudaIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        if self.failing == "cudaIpcGetMemHandle":
            self.errors += 1
            return 1
        return 0

    def cudaIpcOpenMemHandle(self, pointer: Any, handle: Any, flags: Any) -> int:
        return self._give("cudaIpcOpenMemHandle", pointer, 200)

    def cudaIpcCloseMemHandle(self, address: Any) -> int:
        self.held.remove(address.value)
        return 0

    cudaFree = cudaIpcCloseMemHandle

    def cudaGetLastError(self) -> int:
        self.errors -= 1
        return 0


@pytest.mark.parametrize("failing", ["cudaMalloc", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "peer"])
def test_peer_memory_that_is_not_to_be_had_leaves_nothing_behind(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = FakeRuntime(failing)
    monkeypatch.setattr(peer_memory, "_runtime", lambda: runtime)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    told: dict[str, bytes] = {"pagecast-ipc/1": b"-" if failing == "peer" else bytes(64)}

    class Store:
        set = staticmethod(told.__setitem__)
        get = staticmethod(told.__getitem__)

    assert peer_memory.ipc_memory(1 << 20, torch.device("cuda"), Store(), 0, 2) is None
    assert not runtime.held
    assert not runtime.errors, "the next call of torch would raise what is left"


def test_workers_end_with_the_engine(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen3").folder, tensor_parallel_size=2)
    (worker,) = engine._team._workers
    engine.close()
    assert worker.process.returncode == 0


def test_a_worker_that_does_not_start_is_the_reason(
    model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CannotRunHere, match="worker 1 ended with exit code 1"):
        engine_of(model_of("qwen3").folder, tensor_parallel_size=2)


def test_what_can_not_be_divided_is_refused(model_of: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tensor_parallel_size is 0"):
        Options(tensor_parallel_size=0).check()
    facts = ModelSpec.find(str(model_of("qwen3").folder)).facts
    with pytest.raises(BadInput, match="does not divide the 4 attention heads"):
        check_shards(facts, 3, by_expert=False)
    facts = ModelSpec.find(str(model_of("qwen3_moe").folder)).facts
    check_shards(facts, 2, by_expert=True)
    with pytest.raises(BadInput, match="does not divide num_experts 6"):
        check_shards(facts, 4, by_expert=True)


def test_a_ring_carries_messages_in_order_and_waits_for_the_slowest() -> None:
    with shared_file() as file:
        waits = []

        def check() -> None:
            waits.append(1)
            if len(waits) > 3:
                raise TimeoutError

        writer = Ring(file.fileno(), 2, (16, 8), check=check)
        readers = [Ring(file.fileno(), 2, (16, 8), reader=i, check=check) for i in range(2)]
        for turn in range(9):
            writer.write(b"step %d" % turn, np.arange(turn % 8, dtype=np.int32))
            for reader in readers:
                text, numbers = reader.read()
                assert (text, numbers.tolist()) == (b"step %d" % turn, list(range(turn % 8)))
                reader.done()
        for _ in range(4):
            writer.write(b"", np.empty(0, np.int32))
        readers[0].read()
        readers[0].done()
        with pytest.raises(TimeoutError):  # the other reader is four messages behind
            writer.write(b"", np.empty(0, np.int32))
        with pytest.raises(ValueError, match="room for 16"):
            writer.write(bytes(17), np.empty(0, np.int32))
