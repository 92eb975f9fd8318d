"""Forecasts with measured operations beside recorded runs: the tables of docs/measured-operations.md.

    python tests/benchmarks/measured_operations.py --host               # the host's constants, from the sweep
    python tests/benchmarks/measured_operations.py --host-factor RUN...  # another host, from a sweep on it
    python tests/benchmarks/measured_operations.py --prompts SWEEP --host-time-factor F  # steps with prompts
    python tests/benchmarks/measured_operations.py --recorded [RUN...]  # recorded runs of ours
    python tests/benchmarks/measured_operations.py --training DIR       # inference-sim/training at c4f0340
    python tests/benchmarks/measured_operations.py --servingsim DIR     # LLMServingSim's bench/examples
    python tests/benchmarks/measured_operations.py --silicon FILE       # AIConfigurator's silicon_sample.csv
        [--configs DIR]                         # its model_configs, for models that are not known by name

`--costs roofline` gives the same tables for the roofline, `--host-time-factor F` those on a slower host.
Errors are forecast minus measured, in percent.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.machine.models import model
from pagecast.sim.replay import Kept, replay
from pagecast.sim.runs.forecast import scenario_of
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.sim.scenario import Scenario
from public_runs import PublicRun, servingsim_runs, training_runs

HERE = Path(__file__).resolve()
GROUND = next((p / "shared/groundtruth" for p in HERE.parents if (p / "shared/groundtruth").is_dir()), None)
_WINDOW = 16  # steps, a quarter of a second or so
HEADER = f"{'run':44} TPOT mean     p50     p90  E2E mean     p50 TTFT mean      p50"


def main() -> int:
    """Prints the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", default="measured")
    parser.add_argument("--host-time-factor", type=float)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--host-factor", nargs="+", type=Path)
    parser.add_argument("--prompts", nargs="+", type=Path)
    parser.add_argument("--recorded", nargs="*", type=Path)
    parser.add_argument("--training", type=Path)
    parser.add_argument("--servingsim", type=Path)
    parser.add_argument("--silicon", type=Path)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of the silicon rows, each so many")
    options = parser.parse_args()
    if options.host:
        print_host()
    for folder in options.host_factor or ():
        print_host_factor(RecordedRun.load(folder))
    for folder in options.prompts or ():
        print_prompts(RecordedRun.load(folder), options.host_time_factor)
    if any(option is not None for option in (options.recorded, options.training, options.servingsim)):
        write(HEADER)
    for folder in recorded_folders(options.recorded):
        run = RecordedRun.load(folder)
        show(run.name, compare_recorded(run, options.costs, options.host_time_factor))
    for public in training_runs(options.training, options.costs) if options.training else ():
        show(public.name, compare_public(public))
        if public.overloaded:
            write(f"    overloaded: {public.failed} requests failed, {len(public.results.trace)} count")
    for public in servingsim_runs(options.servingsim, options.costs) if options.servingsim else ():
        show(public.name, compare_public(public))
    if options.silicon:
        print_silicon(options.silicon, options.costs, options.every, options.configs)
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
    scenario = scenario_of(run, costs).changed(host_time_factor=host_time_factor)
    t = run.requests
    columns = ("first_token_s", "finish_s", "arrival_s", "tokens_out")
    real = figures(*(t[name].to_numpy(np.float64) for name in columns))
    return errors(latencies(replay(run.trace(), scenario, kept=Kept(steps=False)).requests), real)


# -- public runs


def compare_public(run: PublicRun) -> dict[str, float]:
    """A public run against its forecast, with the client's share where a client measured."""
    made = replay(run.results.trace, run.scenario, kept=Kept(steps=False))
    if run.results.client is not None:
        made = run.results.client.seen(made)
    return errors(latencies(made.requests), measured_latencies(run))


def measured_latencies(run: PublicRun) -> dict[str, float]:
    """The figures of a public run."""
    results = run.results
    arrival = np.zeros(len(results.trace))
    tokens = results.trace.integers("output_tokens")
    return figures(results.ttft_s, results.e2e_s, arrival, tokens)


def latencies(requests: Any) -> dict[str, float]:
    """The figures of a replay's table of requests."""
    ttft, e2e, tokens = (requests[name].to_numpy(np.float64) for name in ("ttft_s", "e2e_s", "output_tokens"))
    return figures(ttft, e2e, np.zeros(len(ttft)), tokens)


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
    gpus = int(run.meta["config"].get("tensor_parallel_size", 1))
    factor = request * 1e-6 / HOST.request_s(gpus, kv_groups=1)
    write(f"{run.name}: request {request:.1f} us, host_time_factor {factor:.2f}")


def print_prompts(run: RecordedRun, factor: float | None) -> None:
    """How far steps with prompts and pure decode steps are off, on a host of this factor.

    An asynchronous run hides the host, and takes no factor. There a step's launches delay the end of the step
    before, so that not single steps are compared but both kinds fitted to `_WINDOW` steps at a time.
    """
    costs = scenario_of(run, "measured").changed(host_time_factor=factor).step_costs()
    decode, prompts = _window_ratios(run, costs) if costs.pipeline_depth else _step_ratios(run, costs)
    write(
        f"{run.name}: decode steps {100 * decode - 100:+.1f}%, "
        f"steps with prompts {100 * prompts - 100:+.1f}%, apart {100 * np.log(prompts / decode):+.1f}%"
    )


def _step_ratios(run: RecordedRun, costs: Any) -> tuple[float, float]:
    """Composed over measured time of synchronous decode steps and steps with prompts, the host included."""
    steps = run.steps
    totals = {False: [0.0, 0.0], True: [0.0, 0.0]}
    for at in consecutive(run):
        batch = steps.batch(at)
        total = totals[bool(batch.prefill)]
        total[0] += _composed_ns(costs, batch) + costs.host_ns(batch.decode_n + len(batch.prefill))
        total[1] += float(steps.start_ns[at + 1] - steps.start_ns[at])
    decode, prompts = (made / measured for made, measured in (totals[False], totals[True]))
    return decode, prompts


def _window_ratios(run: RecordedRun, costs: Any) -> tuple[float, float]:
    """The same of steps that were planned while another one ran, without the host."""
    from scipy.optimize import least_squares

    steps, windows, at = run.steps, [], 1
    while at + _WINDOW <= len(steps):
        window = range(at, at + _WINDOW)
        if all(steps.start_ns[step] < steps.end_ns[step - 1] for step in window):
            made = {False: 0, True: 0}
            for batch in map(steps.batch, window):
                made[bool(batch.prefill)] += _composed_ns(costs, batch)
            windows.append((float(steps.end_ns[window[-1]] - steps.end_ns[at - 1]), made[False], made[True]))
            at += _WINDOW
        else:
            at += 1
    time, decode, prompts = np.array(windows).T

    def miss(factors: Any) -> Any:
        return (time - factors[0] * decode - factors[1] * prompts) / time / 0.05

    fitted = least_squares(miss, np.ones(2), loss="soft_l1").x
    return 1 / float(fitted[0]), 1 / float(fitted[1])


def _composed_ns(costs: Any, batch: Any) -> int:
    """A step's time without the host; 0 for one that computes nothing."""
    if batch.prefill:
        return int(max(costs.device_ns(batch), costs.launch_ns(batch)))
    return int(costs.decode_line(batch.decode_n).ns(*batch[1:3])) if batch.decode_n else 0


def consecutive(run: RecordedRun) -> Iterator[int]:
    """Steps that another one follows at once."""
    steps = run.steps
    for at in range(len(steps) - 1):
        apart = (steps.start_ns[at + 1] - steps.end_ns[at]) / 1e9
        if steps.section[at] == steps.section[at + 1] and apart <= 0.002:
            yield at


def print_busy() -> None:
    """What steps with prompts take longer where steps are planned ahead: all take what was measured."""
    from pagecast.sim.costs.measured.costs import MeasuredCosts
    from pagecast.sim.costs.measured.host import HostTimes

    assert GROUND
    run = RecordedRun.load(GROUND / "vllm-0.24.0-h200-qwen3-8b/azure_conv_async")
    operations = scenario_of(run, "measured").target().measured().operations
    plain, busy = (
        MeasuredCosts(operations, host=HostTimes(busy=share), pipeline_depth=1) for share in (0.0, 1.0)
    )
    steps, time, parts = run.steps, 0.0, []
    for at in range(2, len(steps) - 1):
        if steps.start_ns[at] >= steps.end_ns[at - 1]:
            continue
        batch = steps.batch(at)
        time += float(steps.end_ns[at] - steps.end_ns[at - 1])
        if batch.prefill:
            parts.append((plain.device_ns(batch), busy.device_ns(batch), plain.launch_ns(batch)))
        else:
            time -= plain.decode_line(batch.decode_n).ns(*batch[1:3])
    device, longer, launch = np.array(parts, np.float64).T
    shares = np.linspace(0.0, 0.2, 201)
    totals = np.array([np.maximum(device + share * (longer - device), launch).sum() for share in shares])
    write(f"busy {100 * np.interp(time, totals, shares):.1f}% ({len(parts)} steps with prompts)")


def sweep_rows(run: RecordedRun) -> Any:
    """Steps with a successor: seconds, composed seconds, prompts or not, requests, tokens, tokens of the step
    before if it had prompts, seconds of the rows."""
    from pagecast.sim.costs.measured.costs import MeasuredCosts
    from pagecast.sim.costs.measured.host import HostTimes

    scenario = scenario_of(run, "measured")
    bare = HostTimes(step=0, request=0, worker_request=0, prompt_step=0, ungraphed_layer=0, hot=0)
    costs = MeasuredCosts(scenario.target().measured().operations, host=bare)
    steps, found = run.steps, []
    for at in consecutive(run):
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


def print_silicon(path: Path, costs: str, every: int, configs: Path | None) -> None:
    """Errors in TPOT at fixed concurrency by GPU or model and engine."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    for number, row in enumerate(csv.DictReader(path.open())):
        if number % every:
            continue
        try:
            error = silicon_error(row, costs, configs)
            for key in ((row["system"], row["backend"]), (row["model_path"], row["backend"])):
                found[key].append(error)
        except BadInput as problem:
            missing[f"{row['backend']} {row['system']}: {_without_folder(str(problem))[:90]}"] += 1
    sizes = f"{'median |error|':>15} {'90%':>7} {'within 20%':>11}"
    write(f"{'GPU or model, engine':44} {'rows':>5} {'median':>8} {sizes}")
    for key, rows in sorted(found.items()):
        tpot = np.array(rows)
        near = 100 * np.mean(np.abs(tpot) < 20)
        name, (middle, most) = " ".join(key), np.percentile(np.abs(tpot), [50, 90])
        write(f"{name:44} {len(rows):5} {np.median(tpot):+7.1f}% {middle:14.1f}% {most:6.1f}% {near:10.0f}%")
    for reason, rows in sorted(missing.items(), key=lambda item: -item[1]):
        write(f"{rows:6} rows left out: {reason}")


def silicon_error(row: dict[str, str], costs: str, configs: Path | None = None) -> float:
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
        model=_silicon_model(row, configs),
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


def _silicon_model(row: dict[str, str], configs: Path | None) -> str:
    """A known model's name, or a folder with the configuration that `configs` has of it.

    Hopper computes nothing in NVFP4: rows of such weights there are of gpt-oss as published, in MXFP4.
    """
    if row["gemm_quant_mode"] == "nvfp4" and row["system"] in ("h100_sxm", "h200_sxm"):
        return row["model_path"]
    name, kind = row["model_path"], row["gemm_quant_mode"] or row["precision"]
    ending = {"fp8": "-FP8", "fp8_block": "-FP8", "nvfp4": "-NVFP4"}.get(kind, "")
    full = name if ending.lower() in name.lower() else name + ending
    if configs is None:
        return full
    try:
        model(full)
    except BadInput:
        plain = name.split("/")[1]
        file = next(
            (
                found
                for each in (f"{plain}{ending}", plain)
                for found in configs.glob(f"*--{each}_config.json")
            ),
            None,
        )
        return full if file is None else _config_folder(file)
    return full


def _config_folder(file: Path) -> str:
    """A folder that holds this configuration as config.json."""
    folder = Path(tempfile.gettempdir()) / "silicon" / file.name.removesuffix("_config.json")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(file.read_text())
    return str(folder)


def _without_folder(problem: str) -> str:
    return problem.replace(f"{Path(tempfile.gettempdir()) / 'silicon'}/", "")


def closed_loop(costs: Any, users: int, isl: int, osl: int) -> float:
    """TPOT in ms of users who ask again at once: a steady mix of `users` requests of all ages.

    Each of the users begins once in `osl` steps: a step has a prompt (or as many as there must be, of 8,192
    tokens in all at most) that often.
    """
    shape = (users, users * (isl + osl // 2), isl + osl)
    plain = costs.decode_line(users).ns(*shape[1:]) + (
        0 if getattr(costs, "pipeline_depth", True) else costs.host_ns(users)
    )
    pieces = -(-isl // 8192)
    together = max(round(min(users / osl, 8192 / isl)), 1)
    batch = Batch(*shape, ((-(-isl // pieces), 0),) * together)
    mixed = max(costs.device_ns(batch), costs.launch_ns(batch))
    share = min(users / osl * pieces / together, 1.0)
    return float((1 - share) * plain + share * mixed) / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
