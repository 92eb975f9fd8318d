"""`pagecast generate | record | bench`: the real engine on the command line.

torch is imported when a command runs, never before.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from pagecast.planner_app import console
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.traces.operations import scale, select
from pagecast.traces.read import read
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.engine.bench import BenchResult
    from pagecast.engine.engine import Engine
    from pagecast.engine.memory_report import MemoryReport

Opt = typer.Option

ModelName = Annotated[str, Opt(help="transformers folder; with --random-weights also a known model's name")]
RandomWeights = Annotated[bool, Opt("--random-weights", help="random weights, for timing without a download")]
Device = Annotated[str, Opt(help="auto (a CUDA GPU), cuda or cpu")]
Dtype = Annotated[str, Opt(help="auto (the checkpoint's; float32 on the CPU), bfloat16, float16, float32")]
Backend = Annotated[str, Opt(help="auto (triton on a GPU, torch elsewhere), triton, flash-attn, torch")]
BlockSize = Annotated[int, Opt(help="tokens in a KV block")]
Blocks = Annotated[int | None, Opt("--num-gpu-blocks", help="KV blocks [what fits; 1024 on the CPU]")]
Share = Annotated[float, Opt(help="fraction of the GPU's memory the engine may use")]
Seqs = Annotated[int, Opt(help="most running requests")]
Tokens = Annotated[int, Opt(help="most tokens in a step")]
Longest = Annotated[int | None, Opt(help="longest prompt + output [the model's]")]
Ahead = Annotated[
    bool, Opt("--async-scheduling/--no-async-scheduling", help="plan a step while the last runs")
]
Eager = Annotated[bool, Opt("--enforce-eager", help="no CUDA graphs")]
Json = Annotated[bool, Opt("--json", help="print one JSON object and nothing else")]


def generate_command(
    prompts: Annotated[
        list[str], typer.Argument(help="texts to go on with; one is streamed", metavar="PROMPT...")
    ],
    model: ModelName,
    max_tokens: Annotated[int, Opt(help="most tokens to generate")] = 256,
    temperature: Annotated[float, Opt(help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, Opt(help="draw from the k likeliest tokens (0: all)")] = 0,
    top_p: Annotated[float, Opt(help="draw from the fewest tokens that have this share together")] = 1.0,
    seed: Annotated[int | None, Opt(help="repeats a draw [a new one each time]")] = None,
    n: Annotated[int, Opt("--n", "-n", help="texts for each prompt")] = 1,
    ignore_eos: Annotated[bool, Opt("--ignore-eos", help="go on past the end of the text")] = False,
    chat: Annotated[bool, Opt("--chat", help="put each prompt into the model's chat template")] = False,
    random_weights: RandomWeights = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attention: Backend = "auto",
    block_size: BlockSize = 16,
    num_gpu_blocks: Blocks = None,
    gpu_memory_utilization: Share = 0.9,
    max_num_seqs: Seqs = 256,
    max_num_batched_tokens: Tokens = 8192,
    max_model_len: Longest = None,
    async_scheduling: Ahead = True,
    enforce_eager: Eager = False,
    memory: Annotated[bool, Opt("--memory", help="print where the memory went, on stderr")] = False,
    json: Json = False,
) -> None:
    """Generates text with a model on this machine. One text is streamed as it comes."""
    options = engine_options(locals())
    with open_engine(model, options) as engine:
        from pagecast.engine.params import SamplingParams

        if memory:
            console.err.print(memory_table(engine.loaded.memory))
        params = SamplingParams(max_tokens, temperature, top_k, top_p, seed, n, ignore_eos)
        asked = [_chat(engine, prompt) for prompt in prompts] if chat else prompts
        if len(asked) == 1 and n == 1 and not json:
            for piece in engine.stream(asked[0], params):
                typer.echo(piece, nl=False)
            typer.echo()
            return
        completions = engine.generate(asked, params)
    if json:
        console.print_json({"completions": [asdict(completion) for completion in completions]})
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        for output in completion.outputs:
            typer.echo(f"--- {prompt!r} ({output.finish_reason})\n{output.text}")


def record_command(
    trace: Annotated[str, typer.Argument(help="trace file of any known format, or a sample's name")],
    model: ModelName,
    out: Annotated[Path, Opt(help="folder to write the recorded run to")],
    rate: Annotated[float, Opt(help="send requests this many times as fast as the trace")] = 1.0,
    requests: Annotated[int | None, Opt(help="serve only the first so many requests [all]")] = None,
    temperature: Annotated[float, Opt(help="0 takes the likeliest token")] = 0.0,
    random_weights: RandomWeights = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attention: Backend = "auto",
    block_size: BlockSize = 16,
    num_gpu_blocks: Blocks = None,
    gpu_memory_utilization: Share = 0.9,
    max_num_seqs: Seqs = 256,
    max_num_batched_tokens: Tokens = 8192,
    max_model_len: Longest = None,
    scheduling_policy: Annotated[str, Opt(help="fcfs or priority")] = "fcfs",
    enable_prefix_caching: Annotated[
        bool, Opt("--enable-prefix-caching/--no-enable-prefix-caching", help="reuse cached prefixes")
    ] = True,
    async_scheduling: Ahead = True,
    enforce_eager: Eager = False,
    json: Json = False,
) -> None:
    """Serves a trace in wall time and writes what happened as a recorded run.

    Prompts are made from the trace's content; outputs have the trace's lengths.
    """
    options = engine_options(locals())
    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty; give a new folder")
    source = read(trace)
    if requests is not None:
        source = select(source, np.arange(min(requests, len(source))))
    if rate != 1:
        source = scale(source, rate)
    with open_engine(model, options, log_events=True) as engine:
        from pagecast.engine.serve import TraceServer

        if not json:
            console.err.print(memory_table(engine.loaded.memory))
        engine.warm_up()
        run = TraceServer(engine, source, temperature=temperature).run()
        run.write(out)
    table = run.requests
    done = table["finish_s"].notna()
    figures = {
        "run": str(out), "requests": len(table), "finished": int(done.sum()), "steps": len(run.steps),
        "seconds": float(run.steps.end_ns[-1] - run.steps.start_ns[0]) / 1e9 if len(run.steps) else 0.0,
        "output_tokens": int(table["tokens_out"].sum()), "cached_tokens": int(table["cached_tokens"].sum()),
    }  # fmt: skip
    if json:
        console.print_json(figures)
    else:
        words = [f"{value:,.6g} {key}" for key, value in figures.items() if not isinstance(value, str)]
        console.out.print(f"{out}: {', '.join(words)}", soft_wrap=True, markup=False)


def bench_command(
    model: ModelName = "Qwen/Qwen3-0.6B",
    requests: Annotated[int, Opt(help="requests, all sent at once")] = 256,
    shortest: Annotated[int, Opt(help="fewest prompt tokens, and fewest output tokens")] = 100,
    longest: Annotated[int, Opt(help="most prompt tokens, and most output tokens")] = 1024,
    seed: Annotated[int, Opt(help="of lengths, prompts and draws")] = 0,
    temperature: Annotated[float, Opt(help="of the draws")] = 0.6,
    repeat: Annotated[int, Opt(min=1, help="runs, one after another")] = 1,
    random_weights: Annotated[
        bool, Opt("--random-weights/--no-random-weights", help="need no download, and time the same")
    ] = True,
    device: Device = "auto",
    dtype: Dtype = "auto",
    attention: Backend = "auto",
    block_size: BlockSize = 16,
    num_gpu_blocks: Blocks = None,
    gpu_memory_utilization: Share = 0.9,
    max_num_seqs: Seqs = 256,
    max_num_batched_tokens: Tokens = 16384,
    max_model_len: Longest = 4096,
    async_scheduling: Ahead = True,
    enforce_eager: Eager = False,
    kernels: Annotated[
        bool, Opt("--kernels", help="measure the kernels alone, and print their tables instead")
    ] = False,
    json: Json = False,
) -> None:
    """Runs the 256-request benchmark: output tokens a second, and how much of the time the floor is.

    With --kernels: what attention, store and copies reach on this GPU, beside its own ceilings.
    """
    if kernels:
        _kernel_tables()
        return
    options = engine_options(locals())
    with open_engine(model, options) as engine:
        from pagecast.engine.bench import bench

        if not json:
            console.err.print(memory_table(engine.loaded.memory))
        results = []
        for turn in range(repeat):
            result = bench(
                engine, requests=requests, shortest=shortest, longest=longest, seed=seed + turn,
                temperature=temperature,
            )  # fmt: skip
            results.append(result)
            if not json:
                console.out.print(_bench_line(result), soft_wrap=True, markup=False)
    if json:
        rows = [
            {**asdict(r), "tokens_per_s": r.tokens_per_s, "share_of_floor": r.share_of_floor} for r in results
        ]
        console.print_json({"model": model, "options": options, "runs": rows})


def _kernel_tables() -> None:
    _need_engine()
    from pagecast.engine.kernel_bench import tables

    for line in tables():
        console.out.print(line, soft_wrap=True, markup=False)


# ---- what they share


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """The engine's options among a command's."""
    names = (
        "random_weights", "device", "dtype", "attention", "block_size", "gpu_memory_utilization",
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "scheduling_policy",
        "enable_prefix_caching", "enforce_eager",
    )  # fmt: skip
    options = {name: given[name] for name in names if name in given}
    return {
        **options,
        "num_blocks": given["num_gpu_blocks"],
        "pipeline_depth": int(given["async_scheduling"]),
    }


def _need_engine() -> None:
    missing = [name for name in ("torch", "triton", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotRunHere(f"the engine needs {missing[0]}; install it with pip install 'pagecast[engine]'")


@contextmanager
def open_engine(model: str, options: dict[str, Any], *, log_events: bool = False) -> Iterator[Engine]:
    """An engine that is closed whatever happens. Errors: CannotRunHere where torch is not installed."""
    _need_engine()
    from pagecast.engine.engine import Engine

    with Engine(model, log_events=log_events, **options) as engine:
        yield engine


def _chat(engine: Engine, prompt: str) -> str:
    """The prompt as the user's turn of a conversation."""
    tokenizer = engine.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise BadInput(f"{engine.loaded.spec.facts.name} has no chat template; leave out --chat")
    turns = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def memory_table(report: MemoryReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("memory")
    for title in ("predicted", "measured"):
        table.add_column(title, justify="right", no_wrap=True)
    for line in report.lines:
        predicted = "-" if line.predicted is None else console.size(line.predicted)
        table.add_row(line.name, predicted, console.size(line.measured))
    blocks = "-" if report.predicted_blocks is None else f"{report.predicted_blocks:,}"
    table.add_row("KV blocks", blocks, f"{report.num_blocks:,}")
    return table


def _bench_line(result: BenchResult) -> str:
    floor = ""
    if result.floor_s is not None and result.share_of_floor is not None:
        floor = f"; floor {console.seconds(result.floor_s)}, {result.share_of_floor:.0%} of the time"
    each = console.seconds(result.decode_s / max(result.decode_steps, 1))
    planning = console.seconds(result.planning_s / max(result.steps, 1))
    return (
        f"{result.tokens_per_s:,.0f} output tokens/s: {result.output_tokens:,} tokens in "
        f"{console.seconds(result.seconds)}, {result.steps:,} steps{floor}; a decode step "
        f"{each}, planning {planning} a step, "
        f"{1 - result.waited_s / result.seconds:.0%} of the time the host was busy"
    )
