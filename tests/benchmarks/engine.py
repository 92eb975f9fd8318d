"""The engine beside nano-vLLM on one GPU: `python tests/benchmarks/engine.py [MODEL...]`.

256 requests at once, prompts and outputs of 100 to 1024 tokens, random weights, bf16; each engine in a
process of its own, the faster of two runs. See engine_peer.py for how nano-vLLM joins.
"""

import subprocess
import sys

import engine_peer

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B")


def ours(model: str) -> None:
    """Prints our figures of one model."""
    from pagecast.engine.bench import bench
    from pagecast.engine.engine import Engine

    options = {"random_weights": True, "max_num_batched_tokens": 16384, "max_model_len": 4096}
    with Engine(model, **options) as engine:
        runs = [bench(engine)]
        engine.loop.restart()  # the prompts are the same: nothing of them may be found
        runs.append(bench(engine))
    best = min(runs, key=lambda run: run.seconds)
    share = best.share_of_floor or 0.0
    step_ms, busy = best.decode_s / best.decode_steps * 1e3, 1 - best.waited_s / best.seconds
    text = f"{share:.0%} of the time is the floor's; a decode step {step_ms:.2f} ms; host busy {busy:.0%}"
    print(f"| {model} | pagecast | {best.tokens_per_s:,.0f} | {text} |", flush=True)


def theirs(model: str) -> None:
    """Prints nano-vLLM's."""
    from pagecast.engine.bench import workload

    prompts, outputs = workload(256, 100, 1024, 0)
    took = engine_peer.seconds(model, prompts, outputs)
    text = f"attention by {engine_peer.ATTENTION}"
    print(f"| {model} | nano-vLLM | {sum(outputs) / took:,.0f} | {text} |", flush=True)


def main() -> None:
    """Prints a table, an engine a row."""
    print("| model | engine | output tokens/s | |\n|---|---|---|---|", flush=True)
    for model in sys.argv[1:] or MODELS:
        for who in ("ours", *(("theirs",) if engine_peer.present() else ())):
            subprocess.run([sys.executable, __file__, "--run", who, model], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        {"ours": ours, "theirs": theirs}[sys.argv[2]](sys.argv[3])
    else:
        main()
