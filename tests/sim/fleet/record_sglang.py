"""Decisions of SGLang's own gateway (sglang-router 0.3.2, `cache_aware`), recorded for `test_routers.py`.

    pip install --target FOLDER --no-deps sglang-router==0.3.2
    python tests/sim/fleet/record_sglang.py FOLDER

Needs no GPU and no engine: the gateway runs on this machine, in front of workers that only answer. A request
is held as long as its scenario says, so that loads differ. Each content is one character, 128 times.
"""

import argparse
import gzip
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue

WORKERS, CHUNK = 4, 128
OPTIONS = {"cache_threshold": 0.3, "balance_abs_threshold": 3, "balance_rel_threshold": 1.5}
OUT = Path(__file__).parent / "recorded" / "sglang.json.gz"
FIRST_CHARACTER, PER_SCENARIO = 0x4E00, 100
START = """
import sys
sys.path.insert(0, {folder!r})
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(**{fields!r})).start()
"""


class Workers:
    """Servers that note who asks them, and answer when they are told."""

    def __init__(self):
        self.asked = Queue()
        self.released = {}
        self.ports = []
        for number in range(WORKERS):
            server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(number))
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.ports.append(server.server_port)

    def _handler(self, number):
        workers = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *parts):
                pass

            def answer(self, body):
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer({"model_path": "m", "served_model_name": "m"})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                workers.asked.put(number)
                workers.released[body["rid"]].wait()
                self.answer({"text": "x", "meta_info": {}})

        return Handler


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start(folder, ports):
    """The gateway as a process, and where it listens."""
    port = free_port()
    fields = {
        "worker_urls": [f"http://127.0.0.1:{each}" for each in ports],
        "host": "127.0.0.1",
        "port": port,
        "policy": "cache_aware",
        "worker_startup_check_interval": 1,
        "prometheus_port": free_port(),
        "log_level": "error",
        **OPTIONS,
    }
    code = START.format(folder=folder, fields=fields)
    return subprocess.Popen([sys.executable, "-c", code]), f"http://127.0.0.1:{port}/generate"


def send(url, rid, text):
    data = json.dumps({"rid": rid, "text": text}).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()


def scenario(rng):
    """Requests as chunks of text, and which of the earlier ones end before each."""
    texts = [[rng.randrange(PER_SCENARIO) for _ in range(rng.randint(1, 6))] for _ in range(2)]
    requests, held = [], []
    for number in range(rng.randint(6, 16)):
        base = rng.choice(texts)
        chunks = base[: rng.randint(0, len(base))] + [rng.randrange(PER_SCENARIO) for _ in range(2)]
        if rng.random() < 0.5:
            texts.append(chunks)
        ends = [row for row in held if rng.random() < 0.15]
        held = [row for row in held if row not in ends] + [number]
        requests.append({"chunks": chunks, "ends": ends})
    return requests


def decide(workers, url, number, requests):
    """Adds to each request which worker the gateway chose."""
    threads = {}

    def end(row):
        workers.released[f"{number}-{row}"].set()
        threads.pop(row).join()

    for row, request in enumerate(requests):
        for ended in request["ends"]:
            end(ended)
        time.sleep(0.004)
        rid = f"{number}-{row}"
        workers.released[rid] = threading.Event()
        text = "".join(
            chr(FIRST_CHARACTER + number * PER_SCENARIO + chunk) * CHUNK for chunk in request["chunks"]
        )
        threads[row] = threading.Thread(target=send, args=(url, rid, text))
        threads[row].start()
        request["chosen"] = workers.asked.get(timeout=60)
    for row in list(threads):
        end(row)
    time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    workers = Workers()
    process, url = start(options.folder, workers.ports)
    try:
        workers.released["ready"] = threading.Event()
        workers.released["ready"].set()
        for _ in range(60):
            try:
                send(url, "ready", "ready")
                break
            except OSError:
                time.sleep(1)
        while not workers.asked.empty():
            workers.asked.get()
        rng = random.Random(options.seed)
        cases = [scenario(rng) for _ in range(200)]
        for number, case in enumerate(cases):
            decide(workers, url, number, case)
    finally:
        process.kill()
    recorded = {"workers": WORKERS, "options": OPTIONS, "scenarios": cases}
    with gzip.GzipFile(options.out, "wb", mtime=0) as out:
        out.write(json.dumps(recorded, separators=(",", ":")).encode())
    print(f"{len(cases)} scenarios, {sum(map(len, cases))} requests: {options.out}")


if __name__ == "__main__":
    main()
