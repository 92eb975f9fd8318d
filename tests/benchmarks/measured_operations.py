"""Forecasts with measured operations beside recorded runs: the tables of docs/measured-operations.md.

    python tests/benchmarks/measured_operations.py --host               # the host's constants, from the sweep
    python tests/benchmarks/measured_operations.py --host-factor RUN...  # another host, from a sweep on it
    python tests/benchmarks/measured_operations.py --recorded [RUN...]  # recorded runs of ours
    python tests/benchmarks/measured_operations.py --training DIR       # inference-sim/training at c4f0340
    python tests/benchmarks/measured_operations.py --servingsim DIR     # LLMServingSim's bench/examples
    python tests/benchmarks/measured_operations.py --silicon FILE       # AIConfigurator's silicon_sample.csv

`--costs roofline` gives the same tables for the roofline, `--host-time-factor F` those on a slower host.
Errors are forecast minus measured, in percent.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.step_costs import Batch
from pagecast.sim.replay import replay
from pagecast.sim.runs.forecast import scenario_of
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Spans, Trace, starts, table

HERE = Path(__file__).resolve()
GROUND = next((p / "shared/groundtruth" for p in HERE.parents if (p / "shared/groundtruth").is_dir()), None)
HEADER = f"{'run':44} TPOT mean     p50     p90  E2E mean     p50 TTFT mean      p50"


def main() -> int:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", default="measured")
    parser.add_argument("--host-time-factor", type=float)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--host-factor", nargs="+", type=Path)
    parser.add_argument("--recorded", nargs="*", type=Path)
    parser.add_argument("--training", type=Path)
    parser.add_argument("--servingsim", type=Path)
    parser.add_argument("--silicon", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of the silicon rows, each so many")
    options = parser.parse_args()
    if options.host:
        print_host()
    for folder in options.host_factor or ():
        print_host_factor(RecordedRun.load(folder))
    if any(option is not None for option in (options.recorded, options.training, options.servingsim)):
        write(HEADER)
    for folder in recorded_folders(options.recorded):
        run = RecordedRun.load(folder)
        show(run.name, compare_recorded(run, options.costs, options.host_time_factor))
    for path in sorted(options.training.glob("replay_data/*_ground_truth.json")) if options.training else ():
        show(path.name.removesuffix("_ground_truth.json")[16:], compare_training(path, options.costs))
    for path in sorted(options.servingsim.glob("RTXPRO6000/*/vllm/meta.json")) if options.servingsim else ():
        show(f"RTX PRO 6000 {path.parts[-3]}", compare_servingsim(path.parent, options.costs))
    if options.silicon:
        print_silicon(options.silicon, options.costs, options.every)
    return 0


def write(text: str) -> None:
    """A line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# -- figures


def figures(first: Any, end: Any, arrival: Any, tokens: Any) -> dict[str, float]:
    """Latencies of requests that gave at least two tokens."""
    kept = (tokens >= 2) & np.isfinite(end)
    ttft, e2e = (first - arrival)[kept], (end - arrival)[kept]
    tpot = ((end - first) / np.maximum(tokens - 1, 1))[kept]
    found = {}
    for name, values in (("tpot", tpot), ("e2e", e2e), ("ttft", ttft)):
        found[f"{name} mean"] = float(values.mean())
        for q in (50, 90):
            found[f"{name} p{q}"] = float(np.percentile(values, q))
    return found


def simulate(trace: Trace, scenario: Scenario) -> dict[str, float]:
    """The same figures of a replay."""
    made = replay(trace, scenario, keep_steps=False).requests
    first = made["first_token_s"] if "first_token_s" in made else made["arrival_s"] + made["ttft_s"]
    return figures(
        first.to_numpy(np.float64),
        made["finished_s"].to_numpy(np.float64),
        made["arrival_s"].to_numpy(np.float64),
        made["output_tokens"].to_numpy(np.float64),
    )


def errors(made: dict[str, float], real: dict[str, float]) -> dict[str, float]:
    """Forecast minus measured, in percent."""
    return {name: 100 * (made[name] / real[name] - 1) for name in real}


def show(name: str, e: dict[str, float]) -> None:
    """A row of the table."""
    latencies = f"{e['tpot mean']:+8.1f}% {e['tpot p50']:+6.1f}% {e['tpot p90']:+6.1f}%"
    latencies += f" {e['e2e mean']:+8.1f}% {e['e2e p50']:+6.1f}%"
    write(f"{name:44} {latencies} {e['ttft mean']:+8.1f}% {e['ttft p50']:+7.1f}%")


# -- recorded runs of ours


def recorded_folders(wanted: list[Path] | None) -> list[Path]:
    """The folders given, or all recorded runs with requests."""
    if wanted is None:
        return []
    if wanted or GROUND is None:
        return wanted
    return sorted(path.parent for path in GROUND.glob("*/*/requests.csv.gz"))


def compare_recorded(run: RecordedRun, costs: str, host_time_factor: float | None = None) -> dict[str, float]:
    """A recorded run against its forecast."""
    scenario = scenario_of(run, costs).model_copy(update={"host_time_factor": host_time_factor})
    t = run.requests
    columns = ("first_token_s", "finish_s", "arrival_s", "tokens_out")
    real = figures(*(t[name].to_numpy(np.float64) for name in columns))
    return errors(simulate(run.trace(), scenario), real)


# -- public runs

_TRAINING = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "mixtral": "mistralai/Mixtral-8x7B-v0.1",
}
_CODELLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 22016,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
}
_PERIOD = 100  # requests after which prompts come again, as their lengths show (in 98 to 99% of requests)


def compare_training(path: Path, costs: str) -> dict[str, float]:
    """A run of inference-sim/training (vLLM 0.15.1, H100). Prompts come again after 100 requests.

    All requests of a run asked for the same number of tokens and ignored the end of text (`output_len` and
    `ignore_eos` of its `profile.yaml`). The files count tokens of the text tokenized again: a request with a
    tenth of the count took as long as those beside it. The most frequent count is what was generated.
    """
    run = json.loads(Path(str(path).replace("_ground_truth", "")).read_text())
    truth = json.loads(path.read_text())
    asked = [r for r, t in zip(run["requests"], truth, strict=True) if not t["has_error"]]
    done = [t for t in truth if not t["has_error"]]
    arrival = np.array([r["arrival_time_us"] / 1e6 for r in asked])
    counts = np.array([r["output_tokens"] for r in asked])
    tokens = np.full(len(counts), np.bincount(counts).argmax(), np.float64)
    lengths = np.array([r["input_tokens"] for r in asked])
    slots = np.array([r["index"] % _PERIOD for r in asked])
    rows = len(asked)
    spans = Spans(starts(np.ones(rows, np.int64)), slots, np.zeros(rows, np.int64), lengths)
    columns = {
        "arrival_s": arrival,
        "input_tokens": lengths,
        "output_tokens": np.maximum(tokens, 1).astype(np.int64),
    }
    config = run["config"]
    model = next((name for key, name in _TRAINING.items() if key in run["experiment"]), None) or codellama()
    scenario = Scenario(
        model=model,
        gpu="H100",
        costs=costs,
        tensor_parallel_size=config["tensor_parallelism"],
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        num_gpu_blocks=config["kv_blocks_total_gpu"],
    )
    e2e = np.array([t["e2e_s"] for t in done])
    ttft = np.array([t["ttft_s"] for t in done])
    real = figures(arrival + ttft, arrival + e2e, arrival, tokens)
    return errors(simulate(Trace(run["experiment"], table(columns), spans), scenario), real)


def codellama() -> str:
    """A folder with the configuration of CodeLlama-34B."""
    folder = Path(tempfile.gettempdir()) / "codellama-34b"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CODELLAMA))
    return str(folder)


def compare_servingsim(folder: Path, costs: str) -> dict[str, float]:
    """A run of LLMServingSim's (vLLM 0.19, RTX PRO 6000); of data-parallel ranks one, with its share.

    The link between the GPUs is the one that the example's own `config.json` states.
    """
    meta = json.loads((folder / "meta.json").read_text())
    link = json.loads((folder.parent / "config.json").read_text())["link_bw"]
    options = meta["engine_kwargs"]
    ranks = options["data_parallel_size"]
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    base = lines[0]["queued_ts"] - lines[0]["arrival_time"]
    arrival = np.array([line["arrival_time"] + base for line in lines])
    arrival -= arrival.min()
    start = lines[0]["queued_ts"]
    first, end, tokens, lengths = (
        np.array([line[name] for line in lines], np.float64)
        for name in ("first_token_ts", "last_token_ts", "output_toks", "input_toks")
    )
    real = figures(first - start, end - start, arrival, tokens)
    columns = {
        "arrival_s": arrival,
        "input_tokens": lengths.astype(np.int64),
        "output_tokens": tokens.astype(np.int64),
    }
    kept = {name: values[::ranks] for name, values in columns.items()}
    scenario = Scenario(
        model=meta["model"],
        gpu="RTX PRO 6000",
        costs=costs,
        tensor_parallel_size=options["tensor_parallel_size"],
        moe_data_parallel_size=ranks,
        enable_expert_parallel=options["enable_expert_parallel"],
        gpu_link_gb_per_s=float(link),
        max_num_seqs=options["max_num_seqs"],
        max_num_batched_tokens=options["max_num_batched_tokens"],
    )
    return errors(simulate(Trace(folder.parent.name, table(kept)), scenario), real)


# -- the host's constants


def print_host() -> None:
    """A robust fit to what the sweep's steps took longer than their operations."""
    if GROUND is None:
        write("shared/groundtruth is not here")
        return
    run = RecordedRun.load(GROUND / "vllm-0.24.0-h200-qwen3-8b/sweep")
    rows = sweep_rows(run)
    decode = rows[rows[:, 2] == 0]
    step, request = host_of_decodes(decode)
    write(f"step {step:.0f} us, request {request:.1f} us ({len(decode)} decode steps)")
    mixed = rows[rows[:, 2] == 1]
    gap = mixed[:, 0] - mixed[:, 1] - (step + request * mixed[:, 3]) * 1e-6
    hot = mixed[:, 6] * np.minimum(mixed[:, 5] / mixed[:, 4], 1.0) * 1e6
    matrix = np.c_[np.ones(len(mixed)), mixed[:, 4] > 512, hot]
    prompt, ungraphed, share = robust(matrix, gap, mixed[:, 0])
    write(
        f"prompt step {prompt:.0f} us, without a graph {ungraphed / 36:.0f} us per layer, "
        f"hot {100 * share:.1f}% ({len(mixed)} steps with prompts)"
    )
    print_busy()


def host_of_decodes(decode: Any) -> Any:
    """Microseconds of a step and of each request in it, by what decode steps took longer than composed."""
    matrix = np.c_[np.ones(len(decode)), decode[:, 3]]
    return robust(matrix, decode[:, 0] - decode[:, 1], decode[:, 0])


def robust(matrix: Any, gap: Any, time: Any) -> Any:
    """Microseconds for each column of `matrix` that explain `gap` (seconds), misses as a share of `time`."""
    from scipy.optimize import least_squares

    def miss(x: Any) -> Any:
        return (gap - matrix @ (x * 1e-6)) / time / 0.01

    return least_squares(miss, np.zeros(matrix.shape[1]), loss="soft_l1").x


def print_host_factor(run: RecordedRun) -> None:
    """How much longer than on the known host each request of synchronous decode steps takes the host.

    What a step takes besides, errors of the composed operations among it, is a constant of the fit.
    """
    from pagecast.sim.costs.measured.host import HOST

    rows = sweep_rows(run)
    _, request = host_of_decodes(rows[rows[:, 2] == 0])
    write(f"{run.name}: request {request:.1f} us, host_time_factor {request * 1e-6 / HOST.request:.2f}")


def print_busy() -> None:
    """What steps with prompts take longer where steps are planned ahead: all take what was measured."""
    from pagecast.sim.costs.measured.costs import MeasuredCosts
    from pagecast.sim.costs.measured.host import HostTimes

    assert GROUND
    run = RecordedRun.load(GROUND / "vllm-0.24.0-h200-qwen3-8b/azure_conv_async")
    operations = scenario_of(run, "measured").target().measured().operations
    costs = MeasuredCosts(operations, host=HostTimes(busy=0.0), pipeline_depth=1)
    steps, time, parts = run.steps, 0.0, []
    for at in range(2, len(steps) - 1):
        if steps.start_ns[at] >= steps.end_ns[at - 1]:
            continue
        batch = steps.batch(at)
        time += float(steps.end_ns[at] - steps.end_ns[at - 1])
        if batch.prefill:
            parts.append((costs.device_ns(batch), costs.launch_ns(batch)))
        else:
            time -= costs.decode_line(batch.decode_n).ns(*batch[1:3])
    device, launch = np.array(parts, np.float64).T
    shares = np.linspace(0.0, 0.2, 201)
    totals = np.array([np.maximum(device * (1 + share), launch).sum() for share in shares])
    write(f"busy {100 * np.interp(time, totals, shares):.1f}% ({len(parts)} steps with prompts)")


def sweep_rows(run: RecordedRun) -> Any:
    """Steps with a successor: seconds, composed seconds, prompts or not, requests, tokens, tokens of the step
    before if it had prompts, seconds of the rows."""
    from pagecast.sim.costs.measured.costs import MeasuredCosts
    from pagecast.sim.costs.measured.host import HostTimes

    scenario = scenario_of(run, "measured")
    bare = HostTimes(step=0, request=0, prompt_step=0, ungraphed_layer=0, hot=0)
    costs = MeasuredCosts(scenario.target().measured().operations, host=bare)
    steps, found = run.steps, []
    for at in range(len(steps) - 1):
        apart = (steps.start_ns[at + 1] - steps.end_ns[at]) / 1e9
        if steps.section[at] != steps.section[at + 1] or apart > 0.002:
            continue
        batch = steps.batch(at)
        tokens = batch.decode_n + sum(size for size, _ in batch.prefill)
        plain = Batch(*batch[:4])
        made = costs.device_ns(plain) if batch.prefill else costs.decode_line(batch.decode_n).ns(*batch[1:3])
        requests = batch.decode_n + len(batch.prefill)
        time = (steps.start_ns[at + 1] - steps.start_ns[at]) / 1e9
        rows = costs._rows_fs(tokens) / 1e15
        found.append((time, made / 1e9, bool(batch.prefill), requests, tokens, batch.after, rows))
    return np.array(found, np.float64)


# -- aggregate rows

_SYSTEMS = {
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "b300_sxm": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
}


def print_silicon(path: Path, costs: str, every: int) -> None:
    """Errors in TPOT at fixed concurrency by GPU or model and engine."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    for number, row in enumerate(csv.DictReader(path.open())):
        if number % every:
            continue
        try:
            error = silicon_error(row, costs)
            for key in ((row["system"], row["backend"]), (row["model_path"], row["backend"])):
                found[key].append(error)
        except BadInput as problem:
            missing[str(problem)[:90]] += 1
    write(f"{'GPU or model, engine':44} {'rows':>5} {'median':>8} {'median |error|':>15} {'within 20%':>11}")
    for key, rows in sorted(found.items()):
        tpot = np.array(rows)
        near = 100 * np.mean(np.abs(tpot) < 20)
        name, middle = " ".join(key), np.median(np.abs(tpot))
        write(f"{name:44} {len(rows):5} {np.median(tpot):+7.1f}% {middle:14.1f}% {near:10.0f}%")
    for reason, rows in sorted(missing.items(), key=lambda item: -item[1]):
        write(f"{rows:6} rows left out: {reason}")


def silicon_error(row: dict[str, str], costs: str) -> float:
    """Error in TPOT (percent) of one row, from a closed loop of its concurrency.

    Errors: BadInput for what is not simulated: disaggregation, data or pipeline parallelism, unknown models.
    """
    if row["mode"] != "agg":
        raise BadInput("disaggregated")
    concurrency = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    users = int(concurrency.group(1)) if concurrency else int(row["batch_size"])
    if int(row["attention_dp_size"] or 1) > 1 or int(row["pp_size"] or 1) > 1:
        raise BadInput("data or pipeline parallelism")
    if "mtp" in row["id"] or "spec" in row["silicon_data_source"]:
        raise BadInput("speculative decoding")
    scenario = Scenario(
        model=_silicon_model(row),
        gpu=_SYSTEMS[row["system"]],
        costs=costs,
        engine=row["backend"],
        tensor_parallel_size=int(row["tp_size"] or 1),
        enable_expert_parallel=int(row["moe_ep_size"] or 1) > 1,
        kv_cache_dtype="auto" if row["precision"] in ("bf16", "bfloat16") else "fp8",
        max_num_seqs=max(users, 256),
        num_gpu_blocks=4_000_000,
        enable_prefix_caching=False,
    )
    made = closed_loop(scenario.step_costs(), users, int(row["isl"]), int(row["osl"]))
    return 100 * (made / float(row["silicon_tpot_ms"]) - 1)


def _silicon_model(row: dict[str, str]) -> str:
    name, kind = row["model_path"], row["gemm_quant_mode"] or row["precision"]
    ending = {"fp8": "-FP8", "fp8_block": "-FP8", "nvfp4": "-NVFP4"}.get(kind, "")
    return name if ending.lower() in name.lower() else name + ending


def closed_loop(costs: Any, users: int, isl: int, osl: int) -> float:
    """TPOT in ms of users who ask again at once: a steady mix of `users` requests of all ages.

    Each of the users begins once in `osl` steps: a step has a prompt (or as many as there must be, of 8,192
    tokens in all at most) that often.
    """
    shape = (users, users * (isl + osl // 2), isl + osl)
    plain = costs.decode_line(users).ns(*shape[1:]) + (0 if costs.pipeline_depth else costs.host_ns(users))
    pieces = -(-isl // 8192)
    together = max(round(min(users / osl, 8192 / isl)), 1)
    batch = Batch(*shape, ((-(-isl // pieces), 0),) * together)
    mixed = max(costs.device_ns(batch), costs.launch_ns(batch))
    share = min(users / osl * pieces / together, 1.0)
    return float((1 - share) * plain + share * mixed) / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
