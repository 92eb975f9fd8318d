"""Decisions of vLLM production stack's own router code in random scenarios, recorded for `test_routers.py`.

    python tests/sim/fleet/record_production_stack.py CHECKOUT     # of vllm-project/production-stack

Needs no GPU and no engine. Modules that its routing logic imports and does not need here are stood in for.
"""

import argparse
import asyncio
import gzip
import json
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import xxhash

CHUNK = 128  # characters
STOOD_IN = (
    "fastapi",
    "fastapi.requests",
    "requests",
    "starlette",
    "starlette.datastructures",
    "uhashring",
    "vllm_router.service_discovery",
    "vllm_router.stats.engine_stats",
    "vllm_router.log",
)
OUT = Path(__file__).parent / "recorded" / "production_stack.json.gz"


def load(checkout):
    """The routing logic and the request statistics of a checkout."""
    sys.path.insert(0, str(Path(checkout) / "src"))
    for name in STOOD_IN:
        sys.modules[name] = mock.MagicMock()
    package = ModuleType("vllm_router")
    package.__path__ = [str(Path(checkout) / "src" / "vllm_router")]
    sys.modules["vllm_router"] = package
    from vllm_router.prefix import hashtrie
    from vllm_router.routers import routing_logic
    from vllm_router.stats import request_stats

    # Newer versions of xxhash take bytes alone.
    hashtrie.xxhash = SimpleNamespace(xxh64=lambda text: xxhash.xxh64(text.encode()))
    return routing_logic, request_stats


def scenario(rng):
    """Engines, and requests as (time, chunks of text, engines that are up)."""
    engines = rng.randint(2, 6)
    texts = [[rng.randrange(1000) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 4))]
    requests, time = [], 0.0
    for _ in range(rng.randint(5, 30)):
        time += rng.choice([0.0, 0.5, 20.0])
        base = rng.choice(texts)
        chunks = base[: rng.randint(0, len(base))] + [rng.randrange(1000) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            texts.append(chunks)
        up = sorted(rng.sample(range(engines), rng.randint(1, engines))) if rng.random() < 0.2 else None
        requests.append({"time_s": time, "chunks": chunks, "up": up or list(range(engines))})
    return {"engines": engines, "requests": requests}


def text_of(chunks):
    return "".join(f"{chunk:04d}".ljust(CHUNK, "x") for chunk in chunks)


async def decide(logic, stats, case, rng):
    """Adds to each request what the stack's code decides."""
    logic.cleanup_routing_logic()
    stats.SingletonMeta._instances.clear()
    prefix = logic.PrefixAwareRouter()
    monitor = stats.RequestStatsMonitor(60)
    for number, request in enumerate(case["requests"]):
        up = [SimpleNamespace(url=f"e{engine}") for engine in request["up"]]
        text = text_of(request["chunks"])
        _, matched = await prefix.hashtrie.longest_prefix_match(text, {each.url for each in up})
        request["matched"] = sorted(int(url[1:]) for url in matched)
        random.seed(rng.random())
        chosen = await prefix.route_request(up, {}, {}, None, {"prompt": text})
        request["chosen"] = int(chosen[1:])
        slowest = prefix._qps_routing(up, monitor.get_request_stats(request["time_s"]))
        request["slowest"] = int(slowest[1:])
        monitor.on_new_request(slowest, str(number), request["time_s"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    logic, stats = load(options.folder)
    rng = random.Random(options.seed)
    cases = [scenario(rng) for _ in range(200)]
    for case in cases:
        asyncio.run(decide(logic, stats, case, rng))
    with gzip.GzipFile(options.out, "wb", mtime=0) as out:
        out.write(json.dumps(cases, separators=(",", ":")).encode())
    print(f"{len(cases)} scenarios, {sum(len(case['requests']) for case in cases)} requests: {options.out}")


if __name__ == "__main__":
    main()
