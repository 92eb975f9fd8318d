"""Load generators in common use against `pagecast serve`: what they report beside what the server recorded.

    PAGECAST_VLLM_PYTHON=... PAGECAST_AIPERF=... PAGECAST_GUIDELLM=... \\
        python tests/benchmarks/serve_clients.py [CLIENT...] [--time-scale 0.25]
        python tests/benchmarks/serve_clients.py [CLIENT...] \\
            --engine --requests 8 --prompt 300 --output 24 --rate 0.2
        python tests/benchmarks/serve_clients.py [CLIENT...] --engine Qwen/Qwen3-8B --prompt 4000

PAGECAST_VLLM_PYTHON names an interpreter that has vLLM (no kernels needed), the other two the commands
of these clients; the openai package is that of this interpreter. A client that is not there is left out.

One server serves the clients in turn. Simulated: Qwen3-32B on an H200 at a quarter of its speed, so that what
a client takes before it sends is small beside what it measures. --engine: the engine with random weights, of
the model that is named, on a GPU; or without a name a model of 100 million parameters on one core of the CPU,
which leaves the other cores to server and client. Ends with 1 where a mean differs by more than 3%.

Both sides' means are of the same requests. guidellm 0.8.1 may leave the last ones out of its report: it ends
where a wait for news runs out after it has marked the run as complete, and before it has queued the last
result. Such a report is compared with the recording of the requests that it is of, told by their times: the
script sends a request of its own before each client, whose time it knows on both clocks.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.runs.validate import compare_decisions

MODEL = "Qwen/Qwen3-32B"
TOLERANCE = 0.03
_START_S = 120.0
_FLUSHED_S = 0.5  # after so long a request that has ended is in the journal
_DRIVE_VLLM = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


class Work(NamedTuple):
    """A client's load: `rate` requests per second of the wall clock; `seed`: each client's own prompts."""

    url: str
    model: str
    tokenizer: Path
    folder: Path
    requests: int
    prompt: int
    output: int
    rate: float
    seed: int
    timeout_s: float


class Reported(NamedTuple):
    """A client's report: how many requests it is of, and their means in seconds of the wall clock.

    `means`: those of "ttft", "tpot" and "e2e" that the client reports. `starts`: when it sent each request,
    in seconds since 1970, where it reports that.
    """

    requests: int
    means: dict[str, float]
    starts: tuple[float, ...] = ()


def needed(variable: str) -> str:
    """The command that an environment variable names. Errors: LookupError."""
    value = os.environ.get(variable)
    if not value:
        raise LookupError(f"{variable} is not set")
    return value


def run(command: list[str], timeout_s: float) -> str:
    """Runs a client. Errors: RuntimeError with the end of what it printed, or where it takes longer."""
    client = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = client.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} has not ended after {timeout_s:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)  # some have processes of their own
    if client.returncode:
        raise RuntimeError(f"{command[0]} ended with {client.returncode}: {(output + errors)[-2000:]}")
    return output


# ---- the clients


def openai_client(work: Work, *, chat: bool, stream: bool) -> Reported:
    """The official client, measured as its users do: around its calls."""
    return asyncio.run(_openai_client(work, chat=chat, stream=stream))


async def _openai_client(work: Work, *, chat: bool, stream: bool) -> Reported:
    import openai

    client: Any = openai.AsyncOpenAI(base_url=f"{work.url}/v1", api_key="none", max_retries=0)
    words = made_up_words()
    rows: list[tuple[float, float, float]] = []

    def asked(text: str, output: int) -> Any:
        fields: dict[str, Any] = {"model": work.model, "max_tokens": output, "stream": stream}
        fields["extra_body"] = {"ignore_eos": True}
        if chat:
            return client.chat.completions.create(messages=[{"role": "user", "content": text}], **fields)
        return client.completions.create(prompt=text, **fields)

    async def ask(number: int) -> None:
        await asyncio.sleep(number / work.rate)
        start = work.seed + number * 37
        text = " ".join(words[(start + i) % len(words)] for i in range(work.prompt))
        begun = time.perf_counter()
        answer = await asked(text, work.output)
        first = 0.0
        if stream:
            async for chunk in answer:
                piece = chunk.choices[0].delta.content if chat else chunk.choices[0].text
                if piece and not first:
                    first = time.perf_counter()
        end = time.perf_counter()
        rows.append((first - begun, end - begun, (end - first) / max(work.output - 1, 1)))

    warm_up = await asked(words[0], 1)  # the first call loads parts of the library: 60 ms for a chat
    if stream:
        async for _ in warm_up:
            pass
    await asyncio.gather(*[ask(number) for number in range(work.requests)])
    await client.close()
    mean = [sum(row[place] for row in rows) / len(rows) for place in range(3)]
    means = {"ttft": mean[0], "e2e": mean[1], "tpot": mean[2]} if stream else {"e2e": mean[1]}
    return Reported(len(rows), means)


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
    options += ["--seed", str(work.seed)]
    options += [
        "--save-result",
        "--result-filename",
        str(result),
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
    ]
    run([needed("PAGECAST_VLLM_PYTHON"), "-c", _DRIVE_VLLM, *options], work.timeout_s)
    told = json.loads(result.read_text())
    names = {"ttft": "mean_ttft_ms", "tpot": "mean_tpot_ms", "e2e": "mean_e2el_ms"}
    return Reported(told["completed"], {name: told[key] / 1e3 for name, key in names.items()})


def aiperf(work: Work, *, stream: bool) -> Reported:
    """NVIDIA's AIPerf."""
    options = ["--model", work.model, "--url", work.url, "--endpoint-type", "chat", "--ui", "none"]
    options += ["--tokenizer", str(work.tokenizer), "--synthetic-input-tokens-mean", str(work.prompt)]
    options += ["--output-tokens-mean", str(work.output), "--extra-inputs", "ignore_eos:true"]
    options += ["--request-count", str(work.requests), "--request-rate", str(work.rate)]
    options += ["--random-seed", str(work.seed), "--use-server-token-count"]
    options += ["--artifact-dir", str(work.folder / "out"), *(["--streaming"] if stream else [])]
    run([needed("PAGECAST_AIPERF"), "profile", *options], work.timeout_s)
    (file,) = (work.folder / "out").rglob("profile_export_aiperf.json")
    told = json.loads(file.read_text())
    names = {"e2e": "request_latency"}
    if stream:
        names |= {"ttft": "time_to_first_token", "tpot": "inter_token_latency"}
    means = {name: told[key]["avg"] / 1e3 for name, key in names.items()}
    return Reported(round(told["request_count"]["avg"]), means)


def guidellm(work: Work, *, stream: bool) -> Reported:
    """guidellm of the vLLM project."""
    out = work.folder / "out.json"
    target = f"kind=openai_http,target={work.url},model={work.model}"
    options = ["--backend", target if stream else f"{target},stream=false", "--disable-console"]
    options += ["--profile", f"kind=constant,rate={work.rate}"]
    options += ["--constraint", f"kind=max_requests,count={work.requests}"]
    options += ["--tokenizer", f"kind=hf_auto,model={work.tokenizer}", "--output", f"kind=json,path={out}"]
    options += ["--data", f"kind=synthetic_text,prompt_tokens={work.prompt},output_tokens={work.output}"]
    options += ["--seed", f"kind=static,value={work.seed}"]
    run([needed("PAGECAST_GUIDELLM"), "run", *options], work.timeout_s)
    benchmark = json.loads(out.read_text())["benchmarks"][0]
    told = benchmark["metrics"]
    means = {"e2e": told["request_latency"]["successful"]["mean"]}
    if stream:
        means["ttft"] = told["time_to_first_token_ms"]["successful"]["mean"] / 1e3
        means["tpot"] = told["inter_token_latency_ms"]["successful"]["mean"] / 1e3
    starts = tuple(request["request_start_time"] for request in benchmark["requests"]["successful"])
    return Reported(told["request_totals"]["successful"], means, starts)


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
    asked = {
        "vllm": ("PAGECAST_VLLM_PYTHON", ["-c", ask]),
        "aiperf": ("PAGECAST_AIPERF", ["--version"]),
        "guidellm": ("PAGECAST_GUIDELLM", ["--version"]),
    }
    for name, (variable, options) in asked.items():
        with suppress(LookupError, RuntimeError, OSError):
            listed.append(f"{name} {run([needed(variable), *options], _START_S).split()[-1]}")
    return ", ".join(listed)


# ---- the servers


def make_tokenizer(folder: Path, size: int = 0) -> Path:
    """A transformers folder with a byte-level tokenizer for made-up words, of at least `size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = made_up_words()
    syllables = sorted({word[:2] for word in words})
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(syllable[0], syllable[1]) for syllable in syllables]
    merges += [("Ġ", syllable) for syllable in syllables]
    merges += [("Ġ" + word[:2], word[2:]) for word in words]
    longer = (("Ġ" + word, syllable) for word in words for syllable in syllables)
    spare = max(0, size - 1 - len(vocabulary) - len(merges))  # one is the token that ends a text
    merges += itertools.islice(longer, spare)
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
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
    """Puts the sizes of a Qwen3 of some 100 million parameters beside a tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config

    fields = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "head_dim": 64}
    fields |= {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    config = Qwen3Config(**fields, vocab_size=vocabulary, eos_token_id=None)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


def made_up_words() -> list[str]:
    """The words of the tokenizer that `make_tokenizer` makes: each is a token behind a blank."""
    from pagecast.planner_app.server.tokenizer import PackedTokenizer

    own = PackedTokenizer()
    return [own.decode((id,))[1:] for id in own.words.tolist()]


class Server:
    """A server of what the command line asks for, which records what it serves.

    `program`: Python's arguments that stand for `pagecast`.
    """

    def __init__(
        self,
        given: argparse.Namespace,
        folder: Path,
        program: Sequence[str] = ("-m", "pagecast"),
    ) -> None:
        tokenizer = folder / "tokenizer"
        environment = None
        if given.engine is None:
            model, size, self.scale = MODEL, 0, given.time_scale
            options = ["--simulate", "--gpu", "H200", "--time-scale", str(self.scale)]
        elif given.engine:
            model, size, self.scale = given.engine, find_model(given.engine).vocab, 1.0
            options = ["--random-weights", "--max-model-len", "16384"]
        else:
            model, size, self.scale = str(tokenizer), 0, 1.0
            options = ["--random-weights", "--device", "cpu", "--num-gpu-blocks", "1000"]
            options += ["--max-num-seqs", "8", "--max-model-len", "2500", "--max-num-batched-tokens", "512"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the engine's steps leave cores to others
        make_tokenizer(tokenizer, size)
        if given.engine == "":
            make_model(tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self._run = folder / "run"
        command = [sys.executable, *program, "serve", "--port", "0", "--model", model]
        command += ["--tokenizer", str(tokenizer), "--record", str(self._run), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("the server did not start; see above")
        self.url = line.split()[-1]

    def ask(self) -> float:
        """Has one token generated; when that was sent, in seconds since 1970."""
        body = json.dumps({"model": self.model, "prompt": "a", "max_tokens": 1}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        sent_at = time.time()
        with urllib.request.urlopen(request) as answer:
            answer.read()
        return sent_at

    def recorded(self) -> RecordedRun:
        """The recording so far, from the journal where the server lives."""
        time.sleep(_FLUSHED_S)
        return RecordedRun.load(self._run)

    def end(self) -> None:
        """Ends it, once it has finished the requests under way."""
        self._process.terminate()
        self._process.wait(_START_S)


# ---- the comparison


def measure(client: str, given: argparse.Namespace, server: Server) -> Reported:
    """Runs a client.

    Errors: LookupError for one that is not here, RuntimeError for one that fails or leaves requests out of
    its report without telling which.
    """
    rate = given.rate * server.scale
    with tempfile.TemporaryDirectory() as made:
        sizes = (given.requests, given.prompt, given.output)
        seed = zlib.crc32(client.encode()) % 10_000
        work = Work(server.url, server.model, server.tokenizer, Path(made), *sizes, rate, seed, given.timeout)
        reported = CLIENTS[client](work)
    if reported.requests != given.requests and not reported.starts:
        raise RuntimeError(f"the report is of {reported.requests} of {given.requests} requests")
    return reported


def reported_ones(reported: Reported, requests: pd.DataFrame, sent_at: float, scale: float) -> pd.DataFrame:
    """The requests of the recording that a report is of.

    `requests`: the script's own, sent at `sent_at` (seconds since 1970), and those of the client.
    """
    own = requests.iloc[1:]
    if reported.requests == len(own):
        return own
    arrivals = sent_at + (own["arrival_s"] - requests["arrival_s"].iloc[0]).to_numpy() / scale
    nearest = {int(np.abs(arrivals - start).argmin()) for start in reported.starts}
    if len(nearest) != reported.requests:
        raise RuntimeError(
            f"the report is of {reported.requests} of {len(own)} requests, which can't be told"
        )
    return own.iloc[sorted(nearest)]


def cells(reported: Reported, requests: pd.DataFrame, scale: float) -> tuple[str, bool]:
    """Cells of the table, and whether all means agree. `requests`: the client's own in the recording."""
    decode = requests["finish_s"] - requests["first_token_s"]
    recorded = {
        "ttft": (requests["first_token_s"] - requests["arrival_s"]).mean() / scale,
        "tpot": (decode / (requests["tokens_out"] - 1).clip(lower=1)).mean() / scale,
        "e2e": (requests["finish_s"] - requests["arrival_s"]).mean() / scale,
    }
    texts = []
    agrees = True
    for what, ours in recorded.items():
        theirs = reported.means.get(what)
        if theirs is None:
            texts.append("")
            continue
        off = theirs / ours - 1
        agrees = agrees and abs(off) <= TOLERANCE
        texts.append(f"{theirs * 1e3:,.1f} ms, {ours * 1e3:,.1f} recorded: {off:+.1%}")
    return " | ".join(texts), agrees


def compare(client: str, given: argparse.Namespace, server: Server) -> bool:
    """Prints a client's row of the table; whether its means agree, as those of one that is not here do."""
    try:
        sent_at = server.ask()
        reported = measure(client, given, server)
        requests = server.recorded().requests.iloc[-given.requests - 1 :]
        own = reported_ones(reported, requests, sent_at, server.scale)
    except LookupError as error:
        print(f"| {client} | left out: {error} | | |", flush=True)
        return True
    except (RuntimeError, OSError) as error:
        print(f"| {client} | failed | | |", flush=True)
        print(f"{client}: {error}", file=sys.stderr, flush=True)
        return False
    texts, agrees = cells(reported, own, server.scale)
    part = "" if len(own) == given.requests else f" ({len(own)} of {given.requests})"
    print(f"| {client}{part} | {texts} |", flush=True)
    return agrees


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--engine", nargs="?", const="", metavar="MODEL")
    parser.add_argument("--time-scale", type=float, default=0.25)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second of the server's time")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a client may take")
    given = parser.parse_args()
    print(f"clients: {versions()}", flush=True)
    print("| client | TTFT | TPOT | E2E |\n|---|---|---|---|", flush=True)
    agree = []
    with tempfile.TemporaryDirectory() as folder:
        server = Server(given, Path(folder))
        try:
            for client in given.clients or CLIENTS:
                agree.append(compare(client, given, server))
        except KeyboardInterrupt:
            print(f"| {client} | interrupted | | |", flush=True)
            agree.append(False)
        finally:
            server.end()
        decisions = compare_decisions(server.recorded())
    print(f"decisions replayed: {'equal' if decisions.ok else decisions.first_mismatch}")
    sys.exit(0 if all(agree) and decisions.ok else 1)


if __name__ == "__main__":
    main()
