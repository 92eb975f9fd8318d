"""Load generators in common use against `pagecast serve`: what they report beside what the server recorded.

    PAGECAST_VLLM_PYTHON=... PAGECAST_AIPERF=... PAGECAST_GUIDELLM=... \\
        python tests/benchmarks/serve_clients.py [CLIENT...] [--engine] [--time-scale 0.25]

PAGECAST_VLLM_PYTHON names an interpreter that has vLLM (no kernels needed), the other two the commands
of these clients; the openai package is that of this interpreter. A client that is not there is left out. Each
run has a server of its own, Qwen3-32B on an H200 simulated at a quarter of its speed, so that what a client
takes before it sends is small beside what it measures. --engine serves a small random model on the CPU
instead. Ends with 1 where a mean differs by more than 3%.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "Qwen/Qwen3-32B"
TOLERANCE = 0.03
_DRIVE_VLLM = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


class Work(NamedTuple):
    """What a client is asked to send: `rate` requests per second of the wall clock."""

    url: str
    model: str
    tokenizer: Path
    folder: Path
    requests: int
    prompt: int
    output: int
    rate: float


Reported = dict[str, float]
"""Means in seconds of the wall clock, of "ttft", "tpot" and "e2e"; those that the client reports."""


def needed(variable: str) -> str:
    """The command that an environment variable names. Errors: LookupError."""
    value = os.environ.get(variable)
    if not value:
        raise LookupError(f"{variable} is not set")
    return value


def run(command: list[str]) -> str:
    """Runs a client. Errors: RuntimeError with the end of what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.stdout


# ---- the clients


def openai_client(work: Work, *, chat: bool, stream: bool) -> Reported:
    """The official client, measured as its users do: around its calls."""
    return asyncio.run(_openai_client(work, chat=chat, stream=stream))


async def _openai_client(work: Work, *, chat: bool, stream: bool) -> Reported:
    import openai

    client: Any = openai.AsyncOpenAI(base_url=f"{work.url}/v1", api_key="none", max_retries=0)
    words = _words(work.tokenizer)
    rows: list[tuple[float, float, float]] = []

    async def ask(number: int) -> None:
        await asyncio.sleep(number / work.rate)
        text = " ".join(words[(number * 37 + i) % len(words)] for i in range(work.prompt))
        asked: dict[str, Any] = {"model": work.model, "max_tokens": work.output, "stream": stream}
        asked["extra_body"] = {"ignore_eos": True}
        if chat:
            call, asked["messages"] = client.chat.completions, [{"role": "user", "content": text}]
        else:
            call, asked["prompt"] = client.completions, text
        begun = time.perf_counter()
        answer = await call.create(**asked)
        first = 0.0
        if stream:
            async for chunk in answer:
                piece = chunk.choices[0].delta.content if chat else chunk.choices[0].text
                if piece and not first:
                    first = time.perf_counter()
        end = time.perf_counter()
        rows.append((first - begun, end - begun, (end - first) / max(work.output - 1, 1)))

    await asyncio.gather(*[ask(number) for number in range(work.requests)])
    mean = [sum(row[place] for row in rows) / len(rows) for place in range(3)]
    return {"ttft": mean[0], "e2e": mean[1], "tpot": mean[2]} if stream else {"e2e": mean[1]}


def vllm_bench(work: Work, *, chat: bool) -> Reported:
    """`vllm bench serve`; it always streams."""
    result = work.folder / "result.json"
    endpoint = "/v1/chat/completions" if chat else "/v1/completions"
    options = [
        "--backend",
        "openai-chat" if chat else "openai",
        "--base-url",
        work.url,
        "--endpoint",
        endpoint,
    ]
    options += ["--model", work.model, "--tokenizer", str(work.tokenizer), "--dataset-name", "random"]
    options += ["--random-input-len", str(work.prompt), "--random-output-len", str(work.output)]
    options += ["--num-prompts", str(work.requests), "--request-rate", str(work.rate), "--ignore-eos"]
    options += [
        "--save-result",
        "--result-filename",
        str(result),
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
    ]
    run([needed("PAGECAST_VLLM_PYTHON"), "-c", _DRIVE_VLLM, *options])
    told = json.loads(result.read_text())
    names = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "e2e": "mean_e2el_ms"}
    return {name: told[key] / 1e3 for name, key in names.items()}


def aiperf(work: Work, *, stream: bool) -> Reported:
    """NVIDIA's AIPerf."""
    options = ["--model", work.model, "--url", work.url, "--endpoint-type", "chat", "--ui", "none"]
    options += ["--tokenizer", str(work.tokenizer), "--synthetic-input-tokens-mean", str(work.prompt)]
    options += ["--output-tokens-mean", str(work.output), "--extra-inputs", "ignore_eos:true"]
    options += ["--request-count", str(work.requests), "--request-rate", str(work.rate)]
    options += ["--artifact-dir", str(work.folder / "out"), *(["--streaming"] if stream else [])]
    run([needed("PAGECAST_AIPERF"), "profile", *options])
    (file,) = (work.folder / "out").rglob("profile_export_aiperf.json")
    told = json.loads(file.read_text())
    names = {"e2e": "request_latency"}
    if stream:
        names |= {"ttft": "time_to_first_token", "tpot": "inter_token_latency"}
    return {name: told[key]["avg"] / 1e3 for name, key in names.items()}


def guidellm(work: Work, *, stream: bool) -> Reported:
    """guidellm of the vLLM project."""
    out = work.folder / "out.json"
    target = f"kind=openai_http,target={work.url},model={work.model}"
    options = ["--backend", target if stream else f"{target},stream=false", "--disable-console"]
    options += ["--profile", f"kind=constant,rate={work.rate}"]
    options += ["--constraint", f"kind=max_requests,count={work.requests}"]
    options += ["--tokenizer", f"kind=hf_auto,model={work.tokenizer}", "--output", f"kind=json,path={out}"]
    options += ["--data", f"kind=synthetic_text,prompt_tokens={work.prompt},output_tokens={work.output}"]
    run([needed("PAGECAST_GUIDELLM"), "run", *options])
    told = json.loads(out.read_text())["benchmarks"][0]["metrics"]
    reported = {"e2e": told["request_latency"]["successful"]["mean"]}
    if stream:
        reported["ttft"] = told["time_to_first_token_ms"]["successful"]["mean"] / 1e3
        reported["tpot"] = told["inter_token_latency_ms"]["successful"]["mean"] / 1e3
    return reported


CLIENTS: dict[str, Callable[[Work], Reported]] = {
    "openai-completions": lambda work: openai_client(work, chat=False, stream=True),
    "openai-chat": lambda work: openai_client(work, chat=True, stream=True),
    "openai-chat-whole": lambda work: openai_client(work, chat=True, stream=False),
    "vllm-completions": lambda work: vllm_bench(work, chat=False),
    "vllm-chat": lambda work: vllm_bench(work, chat=True),
    "aiperf-chat": lambda work: aiperf(work, stream=True),
    "aiperf-chat-whole": lambda work: aiperf(work, stream=False),
    "guidellm-chat": lambda work: guidellm(work, stream=True),
    "guidellm-chat-whole": lambda work: guidellm(work, stream=False),
}


def versions() -> str:
    """The clients that are there, and their versions."""
    listed = [f"openai {importlib.metadata.version('openai')}"]
    ask = "import importlib.metadata as m; print(m.version('vllm'))"
    for variable, name in (("PAGECAST_AIPERF", "aiperf"), ("PAGECAST_GUIDELLM", "guidellm")):
        command = os.environ.get(variable)
        if command:
            python = Path(command).parent / "python"
            listed.append(f"{name} {run([str(python), '-c', ask.replace('vllm', name)]).strip()}")
    if os.environ.get("PAGECAST_VLLM_PYTHON"):
        listed.append(f"vllm {run([os.environ['PAGECAST_VLLM_PYTHON'], '-c', ask]).strip()}")
    return ", ".join(listed)


# ---- the servers


def make_tokenizer(folder: Path) -> Path:
    """A transformers folder with a byte-level tokenizer that knows made-up words."""
    from pagecast.planner_app.server.tokenizer import PackedTokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = PackedTokenizer()
    words = [own.decode((id,))[1:] for id in own.words.tolist()]
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    syllables = sorted({word[:2] for word in words})
    pairs = [(a[0], a[1]) for a in syllables] + [(word[:2], word[2:]) for word in words]
    for pair in [*pairs, *(("Ġ", word) for word in words)]:
        vocabulary.setdefault("".join(pair), len(vocabulary))
        merges.append(pair)
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config))
    return folder


def make_model(folder: Path) -> None:
    """Puts a small random Qwen3 beside a tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    fields = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    Qwen3ForCausalLM(Qwen3Config(**fields, vocab_size=vocabulary, eos_token_id=None)).save_pretrained(folder)


def _words(tokenizer: Path) -> list[str]:
    from pagecast.planner_app.server.tokenizer import PackedTokenizer

    own = PackedTokenizer()
    return [own.decode((id,))[1:] for id in own.words.tolist()]


def serve(options: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A server, and where it is."""
    command = [sys.executable, "-m", "pagecast.planner_app", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit("the server did not start; see above")
    return process, line.split()[-1]


def compare(name: str, given: argparse.Namespace, tokenizer: Path) -> tuple[str, bool]:
    """Runs one client against a server of its own: a row of the table, and whether all means agree.

    Errors: LookupError for a client that is not here.
    """
    from pagecast.sim.runs.recorded import RecordedRun
    from pagecast.sim.runs.validate import compare_decisions

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if given.engine:
            model, scale = str(tokenizer), 1.0
            options = ["--device", "cpu", "--dtype", "float32", "--num-gpu-blocks", "1000", "--model", model]
            options += ["--max-num-seqs", "8", "--max-model-len", "2500", "--max-num-batched-tokens", "512"]
        else:
            model, scale = MODEL, given.time_scale
            options = ["--simulate", "--model", MODEL, "--gpu", "H200", "--time-scale", str(scale)]
            options += ["--tokenizer", str(tokenizer)]
        process, url = serve([*options, "--record", str(folder / "run")])
        try:
            rate = given.rate * scale
            work = Work(url, model, tokenizer, folder, given.requests, given.prompt, given.output, rate)
            reported = CLIENTS[name](work)
        finally:
            process.terminate()
            process.wait(60)
        recorded = RecordedRun.load(folder / "run")
        same = compare_decisions(recorded).ok
        table = recorded.requests.iloc[-given.requests :]
        decode = table["finish_s"] - table["first_token_s"]
        ours = {
            "ttft": (table["first_token_s"] - table["arrival_s"]).mean() / scale,
            "tpot": (decode / (table["tokens_out"] - 1).clip(lower=1)).mean() / scale,
            "e2e": (table["finish_s"] - table["arrival_s"]).mean() / scale,
        }
        cells = []
        agrees = same
        for what in ("ttft", "tpot", "e2e"):
            if what not in reported:
                cells.append("")
                continue
            off = reported[what] / ours[what] - 1
            agrees = agrees and abs(off) <= TOLERANCE
            cells.append(f"{reported[what] * 1e3:.1f} ms, {ours[what] * 1e3:.1f} recorded: {off:+.1%}")
        cells.append("equal" if same else "DIFFERENT")
        return f"| {name} | {' | '.join(cells)} |", agrees


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--time-scale", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the server's time")
    given = parser.parse_args()
    print(f"clients: {versions()}", flush=True)
    print("| client | TTFT | TPOT | E2E | decisions replayed |\n|---|---|---|---|---|", flush=True)
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder) / "model")
        if given.engine:
            make_model(tokenizer)
        for name in given.clients or CLIENTS:
            try:
                row, agrees = compare(name, given, tokenizer)
            except LookupError as error:
                print(f"| {name} | left out: {error} | | | |", flush=True)
                continue
            wrong = wrong or not agrees
            print(row, flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
