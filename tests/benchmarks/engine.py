"""The engine beside nano-vLLM: `python tests/benchmarks/engine.py [--gpus N] [--repeat N] [MODEL...]`.

256 requests at once, prompts and outputs of 100 to 1024 tokens, random weights, bf16; each engine in a
process of its own, the faster of two runs. See engine_peer.py for how nano-vLLM
joins.
"""

import argparse
import os
import subprocess
import sys
from typing import Any

import engine_peer

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")
_PEER = "PAGECAST_BENCHMARK_PEER"

if os.environ.get(_PEER):  # here and in each worker that nano-vLLM starts
    engine_peer.install()


def ours(model: str, gpus: int, repeat: int) -> None:
    """Prints our figures of one model."""
    from pagecast.engine.bench import bench
    from pagecast.engine.engine import Engine

    options: dict[str, Any] = {"random_weights": True, "max_num_batched_tokens": 16384, "max_model_len": 4096}
    runs = []
    with Engine(model, tensor_parallel_size=gpus, **options) as engine:
        for _ in range(repeat):
            runs.append(bench(engine))
            engine.loop.restart()  # the prompts are the same: nothing of them may be found
    best = min(runs, key=lambda run: run.seconds)
    share = best.share_of_floor or 0.0
    step_ms, busy = best.decode_s / best.decode_steps * 1e3, 1 - best.waited_s / best.seconds
    text = f"{share:.0%} of the time is the floor's; a decode step {step_ms:.2f} ms; host busy {busy:.0%}"
    print(f"| {model} | pagecast | {best.tokens_per_s:,.0f} | {text} |", flush=True)


def theirs(model: str, gpus: int, repeat: int) -> None:
    """Prints nano-vLLM's."""
    from pagecast.engine.bench import workload

    prompts, outputs = workload(256, 100, 1024, 0)
    took = engine_peer.seconds(model, prompts, outputs, gpus=gpus, repeat=repeat)
    text = f"attention by {engine_peer.ATTENTION}"
    print(f"| {model} | nano-vLLM | {sum(outputs) / took:,.0f} | {text} |", flush=True)


def main(models: list[str], gpus: int, repeat: int) -> None:
    """Prints a table, an engine per row."""
    print(f"{gpus} GPU\n\n| model | engine | output tokens/s | |\n|---|---|---|---|", flush=True)
    for model in models:
        for who in ("ours", *(("theirs",) if engine_peer.present() else ())):
            environment = {**os.environ, _PEER: "1"} if who == "theirs" else dict(os.environ)
            command = [sys.executable, __file__, "--run", who, "--gpus", str(gpus), "--repeat", str(repeat)]
            subprocess.run([*command, model], check=True, env=environment)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The engine beside nano-vLLM.")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each engine (tensor parallelism)")
    parser.add_argument("--repeat", type=int, default=2, help="runs, of which the fastest counts")
    parser.add_argument("--run", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is None:
        main(list(given.models), given.gpus, given.repeat)
    else:
        {"ours": ours, "theirs": theirs}[given.run](given.models[0], given.gpus, given.repeat)
