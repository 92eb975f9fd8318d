"""Malformed, oversized, slow and aborted requests leave a server as it was."""

import asyncio
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagecast.planner_app.server.guard import ARRIVAL, Guard
from pagecast.planner_app.server.tokenizer import PackedTokenizer
from starlette.types import Message, Receive, Scope, Send

from .conftest import finishes_its_stream_at_sigterm

BAD = (
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe\x00",
    b'{"prompt": ' + b"[" * 5000,
    b'{"prompt": "\\ud800", "max_tokens": 1}',
    b'{"prompt": [1e400]}',
    b'{"prompt": "x", "max_tokens": 1e400}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "seed": 99999999999999999999999999}',
    b'{"prompt": {"a": 1}}',
    b'{"prompt": [[1], "x"]}',
    b'{"prompt": "x", "model": 5}',
    b'{"prompt": "x", "stop": [1, 2]}',
    b'{"messages": "x"}',
    b'{"messages": [{"role": "user", "content": [{"type": 5}]}]}',
    b'{"tokens": [-1]}',
    b'{"tokens": [9223372036854775807]}',
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


def head(path: str, length: int | str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "content-type: application/json", "connection: close"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


async def rude(port: int, rng: random.Random) -> bytes:
    """One request of a kind that no client should send; the answer, as far as it was waited for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kind = rng.randrange(8)
    path = rng.choice(PATHS)
    good = json.dumps({"prompt": "some words", "max_tokens": rng.randrange(1, 3000), "stream": True}).encode()
    answer = b""
    try:
        if kind <= 2:
            body = rng.choice(BAD)
            writer.write(head(path, len(body)) + body)
            answer = await reader.read()
        elif kind == 3:
            writer.write(head(path, rng.choice(["10000000", "99999999999999999999", "-1", "x"])) + b"x" * 100)
            answer = await reader.read()
        elif kind == 4:
            writer.write(head(path, len(good)) + good[:-3])  # the rest never comes
            await asyncio.sleep(rng.random() * 0.05)
        elif kind == 5:
            writer.write(
                rng.choice([b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"nonsense\r\n\r\n"])
            )
            answer = await reader.read()
        else:
            writer.write(head("/v1/completions", len(good)) + good)
            answer = await reader.read(rng.randrange(1, 2000))  # and leaves amid the answer
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return answer


async def attack(port: int, count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    gate = asyncio.Semaphore(40)

    async def one() -> bytes:
        async with gate:
            return await asyncio.wait_for(rude(port, rng), 120)  # the machine may be busy

    return await asyncio.gather(*[one() for _ in range(count)])


def served(*options: str, errors: Any = subprocess.PIPE) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and its address. `errors`: a file for what it prints there."""
    command = [
        sys.executable,
        "-m",
        "pagecast",
        "serve",
        "--simulate",
        "--gpu",
        "H200",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def settled(url: str) -> dict[str, float]:
    """The gauges once nothing runs."""
    until = time.monotonic() + 20
    while True:
        text = httpx.get(f"{url}/metrics", timeout=20).text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:")]
        values = {name.split("{")[0]: float(value) for name, value in rows}
        if not values["vllm:num_requests_running"] or time.monotonic() > until:
            return values


def test_a_thousand_rude_requests_leave_no_trace() -> None:
    process, url = served("--max-body-bytes", "100000", "--body-timeout", "0.3")
    try:
        answers = asyncio.run(attack(int(url.rsplit(":", 1)[1]), 1000))
        values = settled(url)
        assert values["vllm:num_requests_running"] == values["vllm:kv_cache_usage_perc"] == 0
        body = {"prompt": "still here", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in errors, errors[-3000:]
    codes = {answer[9:12] for answer in answers if len(answer) > 11 and answer.startswith(b"HTTP")}
    assert codes <= {b"200", b"400", b"404", b"408", b"413"}, codes
    assert {b"200", b"400", b"413"} <= codes


def test_a_request_has_arrived_when_its_body_has() -> None:
    parts = ["{", "}"]
    arrivals: list[int] = []
    times = iter([500])

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0).encode(), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        raise AssertionError(message)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrivals.append(scope[ARRIVAL])

    def clock() -> int:
        assert not parts
        return next(times)

    guard = Guard(
        app, api_keys=(), max_body_bytes=10, body_timeout_s=1, refused=lambda status: None, clock=clock
    )
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(guard(scope, receive, send))
    assert arrivals == [500]


class SlowTokenizer(PackedTokenizer):
    """Takes as long as it is told to, and lets other threads run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def encode(self, text: str) -> list[int]:
        if len(text) > 10_000:
            self.begun.set()
            assert self.may_end.wait(20)
        return super().encode(text)


def test_others_are_served_while_a_long_text_is_tokenized(serve: Any) -> None:
    one = serve()
    tokenizer = one.replica.intake.tokenizer = SlowTokenizer()
    ended: list[str] = []

    def ask(name: str, prompt: str) -> None:
        with one.client() as http:
            answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            ended.append(f"{name} {answer.status_code}")

    asking = [threading.Thread(target=ask, args=("long", "long " * 4000))]
    asking[0].start()
    assert tokenizer.begun.wait(10)
    with one.client() as http:
        assert http.get("/health", timeout=5).status_code == 200
    asking.append(threading.Thread(target=ask, args=("short", "short")))
    asking[1].start()
    asking[1].join(0.3)
    assert not ended  # a request does not overtake the one before it
    tokenizer.may_end.set()
    for thread in asking:
        thread.join(20)
    assert sorted(ended) == ["long 200", "short 200"]


def test_sigterm_finishes_what_is_under_way() -> None:
    finishes_its_stream_at_sigterm(*served())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_is_flat_over_ten_minutes_of_load(tmp_path: Path) -> None:
    seconds = float(os.environ.get("PAGECAST_SOAK_S", "600"))
    options = ("--max-num-seqs", "64", "--num-gpu-blocks", "3000", "--body-timeout", "0.3")
    log = tmp_path / "errors.txt"
    with log.open("w") as errors:  # not a pipe that nobody reads
        process, url = served(*options, errors=errors)
    port = int(url.rsplit(":", 1)[1])
    sizes: list[float] = []
    try:
        started = time.monotonic()
        round_ = 0
        while time.monotonic() - started < seconds:
            asyncio.run(attack(port, 200, seed=round_))
            round_ += 1
            gc.collect()
            sizes.append(resident_mib(process.pid))
        assert settled(url)["vllm:kv_cache_usage_perc"] == 0
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in log.read_text()
    third = len(sizes) // 3
    print(f"{round_ * 200} requests; {sizes[third]:.0f} MiB after a third, {sizes[-1]:.0f} MiB at the end")
    assert sizes[-1] < sizes[third] + 15


@pytest.mark.slow
def test_replicas_have_ports_of_their_own(tmp_path: Path) -> None:
    command: list[Any] = [
        sys.executable,
        "-m",
        "pagecast",
        "serve",
        "--simulate",
        "--replicas",
        "3",
    ]
    for first in (18_100, 18_200, 18_300):
        process = subprocess.Popen(
            [*command, "--port", str(first), "--record", str(tmp_path / str(first))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if line:
            break
        process.communicate(timeout=30)
    try:
        for number in range(3):
            body = {"prompt": "x " * 20, "max_tokens": number + 1}
            url = f"http://127.0.0.1:{first + number}"
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
            text = httpx.get(f"{url}/metrics").text
            assert (
                f'vllm:generation_tokens_total{{engine="0",model_name="Qwen/Qwen3-8B"}} {number + 1}.0'
                in text
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    folders = sorted(path.name for path in (tmp_path / str(first)).iterdir())
    assert folders == ["replica-0", "replica-1", "replica-2"]
