"""The engine behind HTTP: it says what it says offline, and a recorded run of it is replayed."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pagecast.engine.params import SamplingParams
from pagecast.planner_app.server.building_engine import engine_facts, engine_work
from pagecast.planner_app.server.engine_front import front_replica
from pagecast.planner_app.server.engine_mail import mail_sockets
from pagecast.planner_app.server.options import ServeOptions
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions
from prometheus_client.parser import text_string_to_metric_families

from ..planner_app.server.conftest import Running, finishes_its_stream_at_sigterm, running

TIER_AND_DRAFTS = {
    "num_blocks": 16,
    "kv_offloading_size": 60 * 2 * 2 * 16 * 2 * 32 * 4 / 2**30,  # 60 blocks
    "speculative_config": '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}',
}


@pytest.fixture
def serve(model_with_text: Any, engine_of: Any) -> Any:
    """Serves engines of the model whose tokens are bytes until the test ends, each in a thread of its own."""
    opened: list[tuple[Any, threading.Thread, Any]] = []

    def start(options: dict[str, Any] | None = None, **server: Any) -> Running:
        engine = engine_of(model_with_text.folder, **{"num_blocks": 200, **(options or {})})
        chosen = ServeOptions(model=str(model_with_text.folder), served_model_name=("tiny",), **server)
        front, back = mail_sockets()
        work = engine_work(engine, chosen, back)
        thread = threading.Thread(target=work.run)
        context = running(front_replica(engine_facts(engine), chosen, front))
        opened.append((context, thread, engine))
        thread.start()
        start.engine = engine  # type: ignore[attr-defined]
        return context.__enter__()

    yield start
    for context, thread, engine in opened:
        context.__exit__(None, None, None)
        thread.join(20)
        engine.close()


def test_it_answers_as_the_engine_does_offline(
    serve: Callable[..., Running], model_with_text: Any, engine_of: Any
) -> None:
    params = SamplingParams(max_tokens=20)
    offline = engine_of(model_with_text.folder).generate("Once upon a time", params)[0].outputs[0]
    one = serve()
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none")
    asked: Any = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == offline.text
    assert whole.usage is not None and whole.usage.completion_tokens == len(offline.token_ids)
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == offline.text
    stop = offline.text[3:5]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (offline.text[: offline.text.index(stop)], "stop")
    ended = client.completions.create(**asked, extra_body={"stop_token_ids": [offline.token_ids[6]]}).choices[
        0
    ]
    first = offline.token_ids.index(offline.token_ids[6])
    assert ended.finish_reason == "stop" and ended.stop_reason == offline.token_ids[6]  # type: ignore[attr-defined]
    assert ended.text == one.replica.intake.tokenizer.decode(offline.token_ids[:first])
    with pytest.raises(openai.BadRequestError, match="logprobs are not available here"):
        client.completions.create(**asked, logprobs=1)
    with one.client() as http:
        text = http.get("/metrics").text
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in text
        assert http.post("/v1/completions", json={"prompt": [999]}).status_code == 400


@pytest.mark.parametrize(("depth", "more"), [(0, {}), (1, {}), (0, TIER_AND_DRAFTS)])
def test_a_run_recorded_from_the_server_with_disconnects_is_replayed(
    depth: int, more: dict[str, Any], serve: Callable[..., Running], tmp_path: Path
) -> None:
    options = {"num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 48, "pipeline_depth": depth}
    options |= more
    one = serve(options, record=tmp_path / "run")
    rng = np.random.default_rng(depth)

    async def ask(http: httpx.AsyncClient, number: int) -> int:
        shared = "shared words " * int(rng.integers(6))
        body = {"prompt": f"{shared}{number}", "max_tokens": int(rng.integers(1, 60)), "stream": True}
        body["stop"] = ["zz", "e"] if number % 5 == 0 else None
        leave = int(rng.integers(1, 8)) if number % 4 == 0 else 1000
        await asyncio.sleep(float(rng.random()))
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                leave -= line.startswith("data")
                if not leave:
                    break
        return answer.status_code

    async def flood() -> list[int]:
        async with httpx.AsyncClient(
            base_url=one.url, timeout=60, limits=httpx.Limits(max_connections=None)
        ) as http:
            return await asyncio.gather(*[ask(http, number) for number in range(40)])

    assert set(asyncio.run(flood())) == {200}
    again = ("first text " * 8, "other words " * 18, "third thing " * 18, "first text " * 8) if more else ()
    with one.client() as http:
        for prompt in again:  # the first is evicted from the device by the others, and loaded from the host
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
    until = time.monotonic() + 10
    while one.replica.backend.load().running and time.monotonic() < until:
        time.sleep(0.01)
    assert one.replica.backend.load().used_blocks == 0
    time.sleep(0.4)  # the journal is flushed
    run = RecordedRun.load(tmp_path / "run")
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert report.requests == 40 + len(again)
    assert run.requests["cancelled_s"].notna().sum() >= 5
    if more:
        metrics = {s.name: s.value for f in families(one) for s in f.samples if "position" not in s.labels}
        drafts = sum(map(int, " ".join(run.inputs["drafts"]).split()))
        accepted = sum(map(int, " ".join(run.inputs["accepted_drafts"]).split()))
        assert 0 < metrics["vllm:spec_decode_num_draft_tokens_total"] <= drafts
        assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == accepted
        places = [s.value for f in families(one) for s in f.samples if "position" in s.labels]
        assert len(places) == 3 and sum(places) == accepted
        moved = [transfer for transfer in run.transfers if transfer.kind == "store"]
        assert metrics["vllm:kv_offload_store_bytes_total"] == sum(transfer.bytes for transfer in moved)
        assert metrics["vllm:kv_offload_store_size_count"] == len(moved)
        assert 0 < metrics["vllm:kv_offload_cpu_cache_usage_perc"] <= 1
        assert {"load", "store"} <= {transfer.kind for transfer in run.transfers}
        assert "1" in " ".join(run.inputs["accepted_drafts"])


def families(one: Running) -> list[Any]:
    with one.client() as http:
        return list(text_string_to_metric_families(http.get("/metrics").text))


def test_an_engine_that_fails_says_so_and_is_not_healthy(
    serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = serve()

    def fail() -> None:
        raise RuntimeError("the device is gone")

    serve.engine.loop.step = fail
    with one.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
        assert answer.status_code == 500
        assert "the device is gone" in answer.json()["error"]["message"]
        assert http.get("/health").status_code == 503
    assert "pagecast: the engine has failed: the device is gone" in capsys.readouterr().err


def test_the_command_serves_the_engine_in_a_process_of_its_own(model_with_text: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pagecast", "serve", "--model", str(model_with_text.folder)]
    command += ["--port", "0", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks", "200"]
    command += ["--record", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    finishes_its_stream_at_sigterm(process, url)
    run = RecordedRun.load(tmp_path / "run")
    assert compare_decisions(run).ok and run.requests["tokens_out"].tolist() == [60]
