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
from pagecast.planner_app.commands.engine_options import EngineOptions, engine_gather
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.output import Output
from pagecast.planner_app.options import Flag, Options
from pagecast.planner_app.planner.execution.options import MOST_REPLICATES
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.runs.journal import JournalWriter
from pagecast.sim.runs.run_journal import RunJournal
from pagecast.traces.operations import scale, select
from pagecast.traces.read import read
from pydantic import Field
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.engine.bench import BenchResult
    from pagecast.engine.engine import Engine
    from pagecast.engine.memory_report import MemoryReport
    from pagecast.sim.runs.recorded import RecordedRun

ModelName = Annotated[
    str, typer.Option(help="transformers folder; with --random-weights also a known model's name")
]
MOST_BENCH_TOKENS = 100_000_000


class SamplingOptions(Options):
    """How tokens are drawn; names are those of `SamplingParams`."""

    max_tokens: int = Field(default=256, description="most tokens to generate")
    temperature: float = Field(default=0.0, description="0 takes the likeliest token")
    top_k: int = Field(default=0, description="draw from the k likeliest tokens (0: all)")
    top_p: float = Field(default=1.0, description="draw from the fewest tokens that have this share together")
    seed: int | None = Field(default=None, description="repeats a draw [a new one each time]")
    n: Annotated[int, Flag(("--n", "-n"))] = Field(default=1, description="texts for each prompt")
    ignore_eos: bool = Field(default=False, description="go on past the end of the text")


class GenerateOptions(Options):
    """What is done beside generating."""

    chat: bool = Field(default=False, description="put each prompt into the model's chat template")
    memory: bool = Field(default=False, description="print where the memory went, on stderr")


@with_options
def generate_command(
    prompts: Annotated[
        list[str], typer.Argument(help="texts to go on with; one is streamed", metavar="PROMPT...")
    ],
    model: ModelName,
    sampling: SamplingOptions,
    ask: GenerateOptions,
    engine: Annotated[EngineOptions, engine_gather(without=("scheduling_policy", "enable_prefix_caching"))],
    output: Output,
) -> None:
    """Generates text with a model on this machine. One text is streamed as it comes."""
    from pagecast.engine.params import SamplingParams

    params = SamplingParams(**sampling.model_dump())
    params.check()
    with open_engine(model, engine) as running:
        if ask.memory:
            console.err.print(memory_table(running.loaded.memory))
        inputs = [_chat(running, prompt) for prompt in prompts] if ask.chat else prompts
        if running.tokenizer is None:
            _take_bytes(running)
        if len(inputs) == 1 and sampling.n == 1 and not output.json_only:
            for piece in running.stream(inputs[0], params):
                typer.echo(piece, nl=False)
            typer.echo()
            return
        completions = running.generate(inputs, params)
    if output.json_only:
        console.print_json({"completions": [asdict(completion) for completion in completions]})
        return
    for prompt, completion in zip(prompts, completions, strict=True):
        for text in completion.outputs:
            typer.echo(f"--- {prompt!r} ({text.finish_reason})\n{text.text}")


class RecordOptions(Options):
    """What of a trace is served, and where the run is written."""

    out: Path = Field(description="folder to write the recorded run to")
    rate: float = Field(
        default=1.0,
        description="a factor, not requests per second: send requests this many times as fast as the trace",
    )
    requests: int | None = Field(
        default=None, ge=1, description="serve only the first so many requests [all]"
    )
    temperature: float = Field(default=0.0, description="0 takes the likeliest token")


@with_options
def record_command(
    trace: Annotated[str, typer.Argument(help="trace file of any known format, or a sample's name")],
    model: ModelName,
    ask: RecordOptions,
    engine: Annotated[EngineOptions, engine_gather()],
    output: Output,
) -> None:
    """Serves a trace in wall time and writes what happened as a recorded run.

    Prompts are made from the trace's content; outputs have the trace's lengths. The folder is written as it
    happens: a run that is cut short can be read as far as it went.
    """
    out = ask.out
    _check_sampling(temperature=ask.temperature)
    console.check_folder("--out", out)
    if out.exists() and any(out.iterdir()):
        raise BadInput(f"{out} is not empty; give a new folder")
    source = read(trace)
    if ask.requests is not None:
        source = select(source, np.arange(min(ask.requests, len(source))))
    if ask.rate != 1:
        source = scale(source, ask.rate)
    with open_engine(model, engine, log_events=True) as running:
        from pagecast.engine.described import described
        from pagecast.engine.serve import TraceServer

        if not output.json_only:
            console.err.print(memory_table(running.loaded.memory))
        running.warm_up()
        # Facts of this machine that can't be read are errors before the run, not after it.
        meta = {"name": source.name, **described(running)}
        writer = JournalWriter(out, meta)
        try:
            run = TraceServer(running, source, temperature=ask.temperature, journal=RunJournal(writer)).run()
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
    if output.json_only:
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


class BenchOptions(Options):
    """The requests of the benchmark, and how often it runs."""

    requests: int = Field(default=256, ge=1, description="requests, all sent at once")
    shortest: int = Field(default=100, ge=1, description="fewest prompt tokens, and fewest output tokens")
    longest: int = Field(default=1024, ge=1, description="most prompt tokens, and most output tokens")
    seed: int = Field(default=0, description="of lengths, prompts and draws")
    temperature: float = Field(default=0.6, description="of the draws")
    repeat: int = Field(default=1, ge=1, le=MOST_REPLICATES, description="runs, one after another")
    kernels: bool = Field(
        default=False, description="measure the kernels alone, and print their tables instead"
    )


@with_options
def bench_command(
    *,
    model: ModelName = "Qwen/Qwen3-0.6B",
    ask: BenchOptions,
    engine: Annotated[
        EngineOptions,
        engine_gather(
            without=("scheduling_policy", "enable_prefix_caching"),
            defaults={"random_weights": True, "max_num_batched_tokens": 16384, "max_model_len": 4096},
        ),
    ],
    output: Output,
) -> None:
    """Runs the 256-request benchmark: output tokens per second, and how much of the time the floor is.

    With --kernels: what attention and copies reach on this GPU, beside its own ceilings.
    """
    if ask.kernels:
        _kernel_tables()
        return
    _check_bench(ask, engine["max_model_len"])
    _check_sampling(temperature=ask.temperature)
    with open_engine(model, engine) as running:
        from pagecast.engine.bench import bench

        if not output.json_only:
            console.err.print(memory_table(running.loaded.memory))
        results = []
        for turn in range(ask.repeat):
            result = bench(
                running,
                requests=ask.requests,
                shortest=ask.shortest,
                longest=ask.longest,
                seed=ask.seed + turn,
                temperature=ask.temperature,
            )
            results.append(result)
            if not output.json_only:
                console.out.print(_bench_line(result), soft_wrap=True, markup=False)
    if output.json_only:
        rows = [
            {**asdict(r), "tokens_per_s": r.tokens_per_s, "share_of_floor": r.share_of_floor} for r in results
        ]
        console.print_json({"model": model, "options": engine, "runs": rows})


def _check_bench(ask: BenchOptions, max_model_len: int | None) -> None:
    """Before the engine starts. Errors: BadInput."""
    requests, shortest, longest = ask.requests, ask.shortest, ask.longest
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
