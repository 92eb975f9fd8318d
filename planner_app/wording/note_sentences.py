"""Sentences for the notes that the simulator attaches to a forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagecast.planner_app.wording.quantities import counted
from pagecast.sim.costs.calibration.file import RECORDING, SEGMENT
from pagecast.sim.note import Caution, Note
from pagecast.sim.replay.resample import GENERATOR, SESSIONS

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_NOT_AHEAD = (
    "No run with asynchronous scheduling was fitted, or too short a run: forecasts with asynchronous "
    "scheduling are too slow. Add such a run to the calibration (another --from-run), or turn "
    "async_scheduling off."
)


def sentence(note: str) -> str:
    """One or more sentences for a note; text that is no `Note`, such as that of a trace reader, stays.

    A `Caution` stays one.
    """
    if not isinstance(note, Note):
        return note
    text = _SENTENCES[note.code](note.figures)
    return Caution(text) if isinstance(note, Caution) else text


def sentences(notes: Iterable[str]) -> tuple[str, ...]:
    """A text per note."""
    return tuple(map(sentence, notes))


def _roofline(f: Mapping[str, Any]) -> str:
    def between(name: str) -> str:
        low, high = f[name]
        return f"{low:{'+' if low else ''}d} to {high:+d}%"

    parts = []
    parts.append(
        "Roofline costs come from published rates, not from measurements of this set-up. On recorded runs of "
        f"Qwen3-8B (vLLM 0.24, one H200) the error was {between('decode_steps_percent')} in the time of "
        f"decode steps, {between('prompt_steps_percent')} in the time of steps with prompts, "
        f"{between('tpot_percent')} in mean TPOT, {between('e2e_percent')} in mean E2E and "
        f"{between('ttft_percent')} in mean TTFT, but up to {f['saturated_ttft_percent']:+d}% in mean TTFT "
        "near saturation or when KV blocks run short."
    )
    if (mixture := f["mixture"]) is not None:
        low, high = mixture["tpot_percent"]
        least, most = mixture["ttft_percent"]
        parts.append(
            "On three recorded runs of a mixture of experts (Qwen3-30B-A3B, vLLM 0.24, one H200) it was "
            f"{low:+d} to {high:+d}% in mean TPOT and {least:+d} to {most:+d}% in mean TTFT, but "
            f"{mixture['saturated_ttft_percent']:+d}% in mean TTFT near saturation."
        )
    parts.append(f"Other models and GPUs were not checked: allow {f['unchecked_percent']}%.")
    if f["windows"]:
        parts.append(
            "Layers with a sliding window are charged for the mean context of the decode batch: too much "
            "where some contexts are shorter than the window and others are longer."
        )
    parts += _no_calibration(f)
    if f["unmeasured"] is not None:
        parts.append(f"Measured operations do not cover it: {f['unmeasured']}.")
    return " ".join(parts)


def _no_calibration(f: Mapping[str, Any]) -> list[str]:
    """The sentence on calibrations that do not fit, where any was looked for."""
    if f["misfits"] is None:
        return []
    reasons = "; ".join(f"{name} is {reason}" for name, reason in f["misfits"]) or "there is none"
    return [f"No shipped calibration fits ({reasons})."]


def _measured(f: Mapping[str, Any]) -> str:
    if f["windowed"] and f["known"] is None:
        return " ".join((_windowed(f), *_no_calibration(f)))
    text = (
        f"{_judged(f)} Near saturation, over PCIe, and with synchronous scheduling on a slower host it is "
        "more (docs/measured-operations.md). Step costs composed of operations that NVIDIA measured with "
        f"{f['engine']} {f['engine_version']} on "
        f"{f['gpu']}; the model itself was not recorded."
    )
    return " ".join((text, *_no_calibration(f)))


def _judged(f: Mapping[str, Any]) -> str:
    """The errors of runs like the one forecast."""
    like = ", ".join((ENGINES[f["like"][0]], *f["like"][1:]))
    if f["known"] is None:
        return f"Too few public runs are like it ({like}): its error is not known (docs/accuracy.md)."
    runs, tpot, ttft = f["known"]
    return (
        f"Of {runs} public runs like it ({like}) nine in ten were within {tpot}% in mean TPOT and {ttft}% in "
        "mean TTFT (docs/accuracy.md)."
    )


def _windowed(f: Mapping[str, Any]) -> str:
    """The sentences on a model with sliding windows."""
    return (
        "Do not rely on these figures or their intervals: on two recorded runs of a model with sliding "
        f"windows (Gemma 3 4B, vLLM) the forecast was too short by up to {f['tpot_percent']}% in mean TPOT, "
        f"{f['e2e_percent']}% in mean E2E and {f['ttft_percent']}% in mean TTFT, for their host was slower "
        "than counted (docs/measured-operations.md). Step costs composed of operations that NVIDIA measured "
        f"with {f['engine']} {f['engine_version']} on {f['gpu']}; the model itself was not recorded."
    )


def _corrected(f: Mapping[str, Any]) -> str:
    sources = ", ".join(f["sources"])
    return (
        f"Step costs composed of operations measured with {f['engine']} {f['engine_version']} on {f['gpu']}, "
        f"corrected by three numbers fitted to the latencies of {f['requests']:,} requests ({sources}). Such "
        "results say little about single steps: the intervals show how little."
    )


def _calibrated(f: Mapping[str, Any]) -> str:
    steps = "an unknown number of" if f["steps"] is None else f"{f['steps']:,}"
    titles = {RECORDING: "a recording", SEGMENT: "a segment of the sweep"}
    parts: list[str] = []
    for part, (total, median) in f["left_out"].items():
        begin = "For" if parts else "TPOT follows step times: for"
        parts.append(
            f"{begin} {titles[part]} that was left out of the fit, total step time was off by up to "
            f"{total:.1f}% and the median step by up to {median:.1f}%."
        )
    if not f["left_out"]:
        parts.append("No run was left out of the fit, so the error on other runs is unknown.")
    parts += _shared(f)
    parts.append(
        f"Step costs fitted to {steps} steps of {f['engine']} {f['engine_version']} with {f['model']} on "
        f"{f['gpu']}."
    )
    return " ".join(parts)


def _shared(f: Mapping[str, Any]) -> list[str]:
    """The sentence that holds for all fitted costs."""
    percent = f["saturation_ttft_percent"]
    parts = [f"Near saturation, a change of 1% in step time can change TTFT by {percent}%."]
    return [*parts, _NOT_AHEAD] if f["not_ahead"] else parts


def _outside_fit(f: Mapping[str, Any]) -> str:
    titles: dict[str, Callable[..., str]] = {
        "tokens": lambda most, fitted: f"steps of up to {most:,} tokens (fitted: {fitted:,})",
        "requests": lambda most, fitted: f"{most:,} requests in a step (fitted: {fitted:,})",
        "context": lambda most, decode, prompt: (
            f"contexts of up to {most:,} tokens (fitted: {decode:,} in decode, {prompt:,} in prompts)"
        ),
        "block_size": lambda size, fitted: f"a block size of {size:,} (fitted: {fitted:,})",
    }
    limits = ", ".join(titles[name](*figures) for name, figures in f.items())
    return f"Outside the range that the step costs were fitted to, so their error is unknown: {limits}."


def _in_sample(f: Mapping[str, Any]) -> str:
    part = "" if f["part"] == 1 else f"the first {100 * f['part']:.0f}% of "
    return (
        f"{f['calibration']} was fitted to {part}this run ({f['run']}): the comparison checks the fit, not "
        "the forecast. Use another run to judge the forecast."
    )


def _other_engine(f: Mapping[str, Any]) -> str:
    return f"The step costs were fitted to {f['fitted']}, but this run is from {f['recorded']}."


def _other_kernels(f: Mapping[str, Any]) -> str:
    return (
        f"The step costs were fitted to other kernels ({f['fitted']}) than this run was made with "
        f"({f['recorded']}): the comparison holds what these differ by."
    )


def _client_share(f: Mapping[str, Any]) -> str:
    return (
        f"The results are a client's: {f['fixed_ms']:.1f} ms, and {f['per_thousand_ms']:.1f} ms per 1,000 "
        "prompt tokens, are added to TTFT and E2E for HTTP, tokenizing and the way to the engine and back."
    )


def _few_draws(f: Mapping[str, Any]) -> str:
    draws = counted(f["draws"], "draw")
    return f"Intervals from {draws} are rough: a 90% interval takes at least {f['enough']} draws."


def _warmup(f: Mapping[str, Any]) -> str:
    return (
        f"{counted(f['requests'], 'request')} of warm-up came first: they are in no figure of requests. "
        "Steps, evictions, preemptions and peak KV usage are of the whole run."
    )


def _workload_redrawn(f: Mapping[str, Any]) -> str:
    begin = "The intervals include the uncertainty of the workload: each replicate"
    if f["source"] == GENERATOR:
        return f"{begin} serves a trace from the same generator with another seed."
    units = "sessions" if f["source"] == SESSIONS else "time windows"
    loss = f"{begin} draws {units} of the trace at random. Prefix reuse between {units} is partly lost"
    if f["reused"] is None or f["reused_in_draws"] is None:
        return f"{loss}."
    return (
        f"{loss}: {f['reused']:.1%} of eligible prompt tokens are reused in the trace, "
        f"{f['reused_in_draws']:.1%} in the median replicate."
    )


def _beyond_model_length(f: Mapping[str, Any]) -> str:
    return (
        f"The longest request has {f['longest_tokens']:,} tokens, but {f['model']} was made for "
        f"{f['model_tokens']:,}. An engine rejects longer requests by default; --max-model-len "
        f"{f['model_tokens']} rejects them here."
    )


def _speculation(f: Mapping[str, Any]) -> str:
    text = (
        "Steps that verify draft tokens are timed as decode steps with more rows, and drafting by the "
        "weights that it reads: neither was compared with a measured run."
    )
    if f["lookup"]:
        text = (
            "Steps that verify n-grams are timed as steps with short prompts: mean TPOT of recorded runs was "
            "off by -12 to +19%."
        )
    if f["drafter_memory"]:
        text += (
            " The memory budget has no room for the drafter's weights and KV: give --num-gpu-blocks where "
            "they are known."
        )
    return text


def _no_acceptance(f: Mapping[str, Any]) -> str:
    return (
        "The acceptance of draft tokens is not given, so every draft token is rejected: these figures show "
        f"the cost of speculation without its gain. Give it as {f['method']}:{f['drafts']}:ACCEPTANCE, "
        'or in JSON as "acceptance", with the acceptance that you measured.'
    )


def _sliding_windows(f: Mapping[str, Any]) -> str:
    return (
        f"{f['model']} has layers with sliding windows: each block of a sequence counts as "
        f"{f['blocks_per_block']:.2f} blocks of the engine, the mean over the lengths in this trace."
    )


def _context_parallel(f: Mapping[str, Any]) -> str:
    return (
        f"Decode context parallelism over {f['ranks']} GPUs counts in memory and in decisions; step times "
        "are those without it, in which each GPU reads the whole context and exchanges nothing for it."
    )


def _blocks_given(f: Mapping[str, Any]) -> str:
    verb = "is" if len(f["unused"]) == 1 else "are"
    return f"num_gpu_blocks is set to {f['blocks']:,}, so {' and '.join(f['unused'])} {verb} not used."


def _blocks_beyond_memory(f: Mapping[str, Any]) -> str:
    return (
        f"{f['gpus']} x {f['gpu']} has room for about {f['most_blocks']:,} blocks beside the weights of "
        f"{f['model']}, fewer than the {f['blocks']:,} given."
    )


def _memory_uncertain(f: Mapping[str, Any]) -> str:
    return (
        f"A real start may have {f['uncertain']:,} KV blocks more or fewer than the {f['blocks']:,} of this "
        f"forecast ({f['uncertain'] / f['blocks']:.0%}), which the figures and their intervals leave out: "
        "give the number in your engine's log, less 1, as --num-gpu-blocks."
    )


def _out_of_memory(f: Mapping[str, Any]) -> str:
    return (
        f"Does not start: with {f['limit']} the items need {f['missing_gib']:.2f} GiB more than {f['gpu']} "
        "has, so that memory runs out when CUDA graphs are captured. Lower it."
    )


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "roofline_costs": _roofline,
    "measured_costs": _measured,
    "corrected_costs": _corrected,
    "calibrated_costs": _calibrated,
    "outside_fit": _outside_fit,
    "in_sample": _in_sample,
    "other_engine": _other_engine,
    "other_kernels": _other_kernels,
    "client_share": _client_share,
    "few_draws": _few_draws,
    "warmup": _warmup,
    "workload_redrawn": _workload_redrawn,
    "beyond_model_length": _beyond_model_length,
    "sliding_windows": _sliding_windows,
    "context_parallel": _context_parallel,
    "speculation": _speculation,
    "no_acceptance": _no_acceptance,
    "blocks_given": _blocks_given,
    "blocks_beyond_memory": _blocks_beyond_memory,
    "memory_uncertain": _memory_uncertain,
    "out_of_memory": _out_of_memory,
}
