"""`pagecast generate | record | bench`: the real engine on the command line.

torch is imported when a command runs, never before.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_REPLICATES
from pagecast.planner_app.commands.engine_options import ENGINE, EngineOptions, with_engine
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.runs.journal import JournalWriter
from pagecast.sim.runs.run_journal import RunJournal
from pagecast.traces.operations import scale, select
from pagecast.traces.read import read
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.engine.bench import BenchResult
    from pagecast.engine.engine import Engine
    from pagecast.engine.memory_report import MemoryReport
    from pagecast.sim.runs.recorded import RecordedRun

Opt = typer.Option

ModelName = Annotated[str, Opt(help="transformers folder; with --random-weights also a known model's name")]
MOST_BENCH_TOKENS = 100_000_000
Json = Annotated[bool, Opt("--json", help="print one JSON object and nothing else")]


@with_engine(without=("scheduling_policy", "enable_prefix_caching"))
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
    engine: EngineOptions = ENGINE,
    memory: Annotated[bool, Opt("--memory", help="print where the memory went, on stderr")] = False,
    json: Json = False,
) -> None:
    """Generates text with a model on this machine. One text is streamed as it comes."""
    from pagecast.engine.params import SamplingParams

    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed, n, ignore_eos)
    params.check()
    with open_engine(model, engine) as running:
        if memory:
            console.err.print(memory_table(running.loaded.memory))
        inputs = [_chat(running, prompt) for prompt in prompts] if chat else prompts
        if running.tokenizer is None:
            _take_bytes(running)
        if len(inputs) == 1 and n == 1 and not json:
            for piece in running.stream(inputs[0], params):
                typer.echo(piece, nl=False)
            typer.echo()
            return
        completions = running.generate(inputs, params)
    if json:
        console.print_json({"completions": [asdict(completion) for completion in completions]})
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        for output in completion.outputs:
            typer.echo(f"--- {prompt!r} ({output.finish_reason})\n{output.text}")


@with_engine()
def record_command(
    trace: Annotated[str, typer.Argument(help="trace file of any known format, or a sample's name")],
    model: ModelName,
    out: Annotated[Path, Opt(help="folder to write the recorded run to")],
    rate: Annotated[
        float,
        Opt(help="a factor, not requests per second: send requests this many times as fast as the trace"),
    ] = 1.0,
    requests: Annotated[int | None, Opt(min=1, help="serve only the first so many requests [all]")] = None,
    temperature: Annotated[float, Opt(help="0 takes the likeliest token")] = 0.0,
    engine: EngineOptions = ENGINE,
    json: Json = False,
) -> None:
    """Serves a trace in wall time and writes what happened as a recorded run.

    Prompts are made from the trace's content; outputs have the trace's lengths. The folder is written as it
    happens: a run that is cut short can be read as far as it went.
    """
    _check_sampling(temperature=temperature)
    console.check_folder("--out", out)
    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty; give a new folder")
    source = read(trace)
    if requests is not None:
        source = select(source, np.arange(min(requests, len(source))))
    if rate != 1:
        source = scale(source, rate)
    with open_engine(model, engine, log_events=True) as running:
        from pagecast.engine.described import described
        from pagecast.engine.serve import TraceServer

        if not json:
            console.err.print(memory_table(running.loaded.memory))
        running.warm_up()
        # Facts of this machine that can't be read are errors before the run, not after it.
        meta = {"name": source.name, **described(running)}
        writer = JournalWriter(out, meta)
        try:
            run = TraceServer(running, source, temperature=temperature, journal=RunJournal(writer)).run()
        except BaseException:
            with suppress(OSError):
                writer.flush()  # what has happened is a run too
            raise
    _keep(run, out, writer)
    table = run.requests
    done = table["finish_s"].notna()
    figures = {
        "run": str(out),
        "requests": len(table),
        "finished": int(done.sum()),
        "steps": len(run.steps),
        "seconds": float(run.steps.end_ns[-1] - run.steps.start_ns[0]) / 1e9 if len(run.steps) else 0.0,
        "output_tokens": int(table["tokens_out"].sum()),
        "cached_tokens": int(table["cached_tokens"].sum()),
    }
    if "drafts" in run.inputs:
        for name in ("drafts", "accepted_drafts"):
            figures[name] = sum(map(int, " ".join(run.inputs[name]).split()))
    reasons = _reasons(run)
    if json:
        console.print_json({**figures, "reasons": reasons})
    else:
        words = [f"{value:,.6g} {key}" for key, value in figures.items() if not isinstance(value, str)]
        console.out.print(f"{out}: {', '.join(words)}", soft_wrap=True, markup=False)
        for reason, count in reasons.items():
            counted = console.counted(count, "request")
            console.out.print(f"{counted} not finished: {reason}", soft_wrap=True, markup=False)


def _reasons(run: RecordedRun) -> dict[str, int]:
    """Why requests did not finish, the most frequent reason first."""
    if "reason" not in run.requests:
        return {}
    reasons = run.requests["reason"]
    return {str(reason): int(count) for reason, count in reasons[reasons != ""].value_counts().items()}


def _keep(run: RecordedRun, out: Path, writer: JournalWriter) -> None:
    """Puts the run in its journal's place; where that fails, into a temporary folder. Errors: BadInput naming
    that."""
    try:
        writer.replace(run.write)
    except OSError as error:
        rescue = Path(tempfile.mkdtemp(prefix="pagecast-run-"))
        run.write(rescue)
        raise BadInput(
            f"--out {out}: can't be written ({error.strerror or error}); the run is in {rescue}"
        ) from None


@with_engine(
    without=("scheduling_policy", "enable_prefix_caching"),
    defaults={"random_weights": True, "max_num_batched_tokens": 16384, "max_model_len": 4096},
)
def bench_command(
    model: ModelName = "Qwen/Qwen3-0.6B",
    requests: Annotated[int, Opt(min=1, help="requests, all sent at once")] = 256,
    shortest: Annotated[int, Opt(min=1, help="fewest prompt tokens, and fewest output tokens")] = 100,
    longest: Annotated[int, Opt(min=1, help="most prompt tokens, and most output tokens")] = 1024,
    seed: Annotated[int, Opt(help="of lengths, prompts and draws")] = 0,
    temperature: Annotated[float, Opt(help="of the draws")] = 0.6,
    repeat: Annotated[int, Opt(min=1, max=MOST_REPLICATES, help="runs, one after another")] = 1,
    engine: EngineOptions = ENGINE,
    kernels: Annotated[
        bool, Opt("--kernels", help="measure the kernels alone, and print their tables instead")
    ] = False,
    json: Json = False,
) -> None:
    """Runs the 256-request benchmark: output tokens per second, and how much of the time the floor is.

    With --kernels: what attention, store and copies reach on this GPU, beside its own ceilings.
    """
    if kernels:
        _kernel_tables()
        return
    _check_bench(requests, shortest, longest, engine["max_model_len"])
    _check_sampling(temperature=temperature)
    with open_engine(model, engine) as running:
        from pagecast.engine.bench import bench

        if not json:
            console.err.print(memory_table(running.loaded.memory))
        results = []
        for turn in range(repeat):
            result = bench(
                running,
                requests=requests,
                shortest=shortest,
                longest=longest,
                seed=seed + turn,
                temperature=temperature,
            )
            results.append(result)
            if not json:
                console.out.print(_bench_line(result), soft_wrap=True, markup=False)
    if json:
        rows = [
            {**asdict(r), "tokens_per_s": r.tokens_per_s, "share_of_floor": r.share_of_floor} for r in results
        ]
        console.print_json({"model": model, "options": engine, "runs": rows})


def _check_bench(requests: int, shortest: int, longest: int, max_model_len: int | None) -> None:
    """Before the engine starts. Errors: BadInput."""
    if shortest > longest:
        raise BadInput(f"--shortest {shortest} is more than --longest {longest}; lower it")
    if requests * longest > MOST_BENCH_TOKENS:
        raise BadInput(
            f"--requests {requests} x --longest {longest} is {requests * longest:,} tokens; the benchmark "
            f"takes at most {MOST_BENCH_TOKENS:,}"
        )
    if max_model_len is not None and max_model_len < 2 * longest:
        raise BadInput(f"--max-model-len is {max_model_len}; the benchmark needs {2 * longest}")


def _check_sampling(**params: Any) -> None:
    """Before the engine starts. Errors: BadInput naming the parameter."""
    from pagecast.engine.params import SamplingParams

    SamplingParams(**params).check()


def _kernel_tables() -> None:
    _need_engine()
    from pagecast.engine.kernel_bench import tables

    for line in tables():
        console.out.print(line, soft_wrap=True, markup=False)


# ---- what they share


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


def _take_bytes(engine: Engine) -> None:
    """Gives an engine without a tokenizer the one that `pagecast serve` has for such models, and says so."""
    from pagecast.planner_app.server.tokenizer import NumberTokenizer

    facts = engine.loaded.spec.facts
    engine.tokenizer = NumberTokenizer(facts.vocab)
    console.err.print(
        f"note: {facts.name} has no tokenizer here: tokens are the bytes of the prompt, and texts are noise",
        soft_wrap=True,
        markup=False,
    )


def memory_table(report: MemoryReport) -> Table:
    """A table of the engine's memory: predicted beside measured, line by line."""
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
    drafts = ""
    if result.draft_tokens:
        drafts = f"; {result.accepted_tokens:,} of {result.draft_tokens:,} draft tokens accepted"
    return (
        f"{result.tokens_per_s:,.0f} output tokens/s: {result.output_tokens:,} tokens in "
        f"{console.seconds(result.seconds)}, {result.steps:,} steps{floor}; a decode step "
        f"{each}, planning takes {planning} per step, "
        f"{1 - result.waited_s / result.seconds:.0%} of the time the host was busy{drafts}"
    )
