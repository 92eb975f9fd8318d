"""Start-up logs of engines: what was started, the memory and the KV blocks that it found, beside our own.

Lines as vLLM 0.24 to 0.33 (v1/core/kv_cache_utils.py, v1/worker, entrypoints), SGLang 0.5
(managers/scheduler.py, mem_cache/memory_pool.py) and TensorRT-LLM 1.0 to 1.2 (kvCacheManager.cpp) write them.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagecast.planner_app.launch import sglang, trtllm, vllm
from pagecast.planner_app.launch.options import Given, find
from pagecast.planner_app.launch.reading import Reading
from pagecast.planner_app.launch.starts import version_of
from pagecast.sim.core.engines.registry import nearest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import MIB, read_text
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.graphs import capture_sizes
from pagecast.sim.machine.memory import HbmBudget
from pagecast.sim.scenario import Scenario

_MOST_BYTES = 64 * MIB
_REMEDY = "give the log of an engine's start, or a folder of them"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ENUM = re.compile(r"<[\w.]+: ('[^']*'|[\w.]+)>")
_OBJECT = re.compile(r"<[^<>]*>")
_GPU = re.compile(
    r"device_name=([\w-]+)|(NVIDIA[ _](?:GeForce |RTX )?(?:GB|RTX|A|B|H|L)[\w-]*(?: [\w-]+){0,3})"
)
_VERSIONS = {
    "vllm": r"(?:\bversion|LLM engine \(v|vLLM API server version) ?v?(\d+\.\d+[\w.+]*)",
    "sglang": r"(?i:sglang)(?: version)?[ =:]+v?(\d+\.\d+[\w.]*)",
    "trtllm": r"TensorRT[- ]LLM version: (\d+\.\d+[\w.]*)",
}
# A line that tells the engine, and one that only its running server writes.
_SIGNS = {
    "vllm": r"non-default args: |V1 LLM engine|GPU KV cache size: |vLLM (?:API )?server version",
    "sglang": r"server_args=|max_total_num_tokens=|Memory pool end|KV Cache is allocated",
    "trtllm": r"\[TRT-LLM\]|\[TensorRT-LLM\]",
}
_RUNNING = {"vllm": "Avg prompt throughput", "sglang": "Decode batch", "trtllm": "num_scheduled_requests"}
# Figures by name; the last line that has one counts, for engines first profile with a small cache.
_FIGURES = {
    "vllm": {
        "kv_tokens": r"KV cache size: ([\d,]+) tokens",
        "length": r"Maximum concurrency for ([\d,]+) tokens per request",
        "concurrency": r"tokens per request: ([\d.]+)x",
        "all_blocks": r"num_gpu_blocks is: (\d+)",
        "kv_gib": r"Available KV cache memory: ([\d.]+) GiB",
        "weights_gib": r"Model loading took ([\d.]+) GiB",
        "graphs_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
    },
    "sglang": {
        "kv_tokens": r"max_total_num_tokens=(\d+)|#tokens: (\d+)",
        "kv_gib": r"KV size: ([\d.]+) GB",
        "k_gib": r"\bK size: ([\d.]+) GB",
        "v_gib": r"\bV size: ([\d.]+) GB",
        "weights_gib": r"Load weight end.*mem usage=([\d.]+) GB",
        "graphs_gib": r"Capture (?:target )?decode .*end.*mem usage=([\d.]+) GB",
    },
    "trtllm": {
        "kv_tokens": r"max tokens in paged KV cache \((\d+)\)",
        "block_size": r"tokens per block[=:] ?(\d+)",
        "blocks": r"primary blocks=(\d+)",
        "kv_gib": r"Allocated ([\d.]+) GiB for max tokens in paged KV cache",
        "weights_gib": r"after loading model weights \(inside torch\)[^:]*: ([\d.]+) GiB",
    },
}
_SIZES = {
    "vllm": r"'cudagraph_capture_sizes': \[([\d, ]+)\]",
    "sglang": r"Capture .*\bbs[ =]\[([\d, ]+)\]",
    "trtllm": r"CUDA graph batch sizes.*\[([\d, ]+)\]",
}
_OPTIONS = {
    "vllm": r"non-default args: (\{.*\})",
    "sglang": r"server_args=(\{.*\}|ServerArgs\(.*\))",
    "trtllm": r"LLM Args:?\s*(\w+\(.*\)|\{.*\})",
}
# What the engine settled on, by the scenario's fields.
_SETTLED = {
    "vllm": {
        "model": r"V1 LLM engine .*config: model='([^']+)'|[ _]model +(\S+/\S+)|serving model (\S+)",
        "tensor_parallel_size": r"config: model=.*\btensor_parallel_size=(\d+)",
        "max_model_len": r"config: model=.*\bmax_seq_len=(\d+)|Using max model len (\d+)",
        "kv_cache_dtype": r"config: model=.*\bkv_cache_dtype=(\w+)",
        "enable_prefix_caching": r"config: model=.*\benable_prefix_caching=(True|False)",
        "max_num_batched_tokens": r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)",
    },
    "sglang": {
        "max_num_batched_tokens": r"max_total_num_tokens=\d+, chunked_prefill_size=(\d+)",
        "max_prefill_tokens": r"max_total_num_tokens=.*max_prefill_tokens=(\d+)",
        "max_num_seqs": r"max_total_num_tokens=.*max_running_requests=(\d+)",
        "max_model_len": r"max_total_num_tokens=.*context_len=(\d+)",
    },
    "trtllm": {
        "model": r"LLM Args:.*\bmodel='([^']+)'",
        "tensor_parallel_size": r"\btensor_parallel_size=(\d+)",
        "max_model_len": r"\bmax_seq_len=(\d+), max_num_requests",
        "max_num_seqs": r"\bmax_num_tokens=\d+, max_batch_size=(\d+)",
        "max_num_batched_tokens": r"\bmax_num_requests=\d+, max_num_tokens=(\d+)",
    },
}
_INTERNAL = ("model_tag", "subparser", "dispatch_function", "model_impl_name")
_READ = {"vllm": vllm.read, "sglang": sglang.read, "trtllm": trtllm.read}


@dataclass(frozen=True)
class StartupLog:
    """A start of an engine as its log tells it.

    `fields`: a scenario's, of the options that the log has, and the KV blocks that the engine found.
    `figures`: what the log says, by name. `by_hand`: its KV blocks were given, and check nothing.
    """

    where: str
    engine: str
    version: str | None
    fields: dict[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    graph_sizes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    by_hand: bool = False

    def measured(self, scenario: Scenario) -> Scenario:
        """The scenario with the KV blocks that the engine found."""
        blocks = self.blocks(scenario)
        return scenario if blocks is None else scenario.changed(num_gpu_blocks=blocks)

    def blocks(self, scenario: Scenario) -> int | None:
        """The usable KV blocks that the log tells of; None where it tells none."""
        figures = self.figures
        if self.by_hand:
            return None
        if "blocks" in figures:
            return int(figures["blocks"])
        if "all_blocks" in figures:
            return int(figures["all_blocks"]) - 1
        tokens, size = figures.get("kv_tokens"), scenario.block_size
        if tokens is None or not scenario.layout().plain:
            return None
        if self.engine != "vllm":
            return int(tokens) // size
        # vLLM's tokens are those of sequences of the longest length, whole blocks each; one block is null.
        length = figures.get("length", size)
        return round(tokens / length * -(-int(length) // size)) - 1

    def compared(self, scenario: Scenario) -> list[str]:
        """Where our own prediction differs, figure by figure. `scenario`: without the log's blocks."""
        try:
            budget = scenario.changed(num_gpu_blocks=None).budget()
        except BadInput as error:
            return [f"{self.where}: nothing is predicted beside the log: {error}"]
        assert budget is not None
        lines = []
        for name, said, ours, digits in self._pairs(scenario, budget):
            both = f"the log says {said:,.{digits}f}, we predict {ours:,.{digits}f}"
            lines.append(f"{self.where}: {name}: {both} ({100 * (ours / said - 1):+.1f}%)")
        if self.graph_sizes and self.engine == "vllm":
            ours_sizes = capture_sizes(scenario.max_num_seqs)
            if sorted(self.graph_sizes) != ours_sizes:
                lines.append(
                    f"{self.where}: CUDA graphs: the log has {len(self.graph_sizes)} sizes to "
                    f"{max(self.graph_sizes)}, we predict {len(ours_sizes)} to {max(ours_sizes)}"
                )
        return lines

    def _pairs(self, scenario: Scenario, budget: HbmBudget) -> Iterator[tuple[str, float, float, int]]:
        """Names, the log's figures and ours, and how many digits they are shown with."""
        items = {item.name: item.bytes / GIB for item in budget.items}
        blocks = self.blocks(scenario)
        if blocks is not None:
            yield "KV blocks", blocks, budget.num_gpu_blocks, 0
        elif "kv_tokens" in self.figures and not self.by_hand:
            yield "KV tokens", self.figures["kv_tokens"], budget.kv_tokens, 0
        kv_gib = self.figures.get("kv_gib") or self.figures.get("k_gib", 0) + self.figures.get("v_gib", 0)
        for name, said, item in (
            ("KV cache, GiB", kv_gib, "KV cache"),
            ("weights, GiB", self.figures.get("weights_gib"), "weights"),
            ("CUDA graphs, GiB", self.figures.get("graphs_gib"), "CUDA graphs"),
        ):
            if said and item in items:
                yield name, said, items[item], 2


def read_log(given: str) -> StartupLog:
    """Reads a log, or a folder of logs of equal starts. Errors: BadInput with what the file is instead."""
    folder = Path(given)
    if not folder.is_dir():
        return _log(read_text(given, _MOST_BYTES, _REMEDY), given)
    logs = []
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    for path in files:
        text = read_text(path, _MOST_BYTES, _REMEDY)
        if _engine(text) is not None:
            logs.append(_log(text, str(path)))
    if not logs:
        raise BadInput(f"{given}: none of its {len(files)} files is the start-up log of an engine; {_REMEDY}")
    kinds = {(one.engine, repr(sorted(one.fields.items()))): one for one in logs}
    if len(kinds) > 1:
        listed = ", ".join(one.where for one in kinds.values())
        raise BadInput(f"{given}: has logs of {len(kinds)} different starts; give one of {listed}")
    return logs[-1]


def _engine(text: str) -> str | None:
    return next((engine for engine, sign in _SIGNS.items() if re.search(sign, text)), None)


def _log(text: str, where: str) -> StartupLog:
    text = _COLOUR.sub("", text)
    engine = _engine(text)
    if engine is None:
        raise BadInput(f"{where}: {_what_it_is(text)}; {_REMEDY}")
    notes: list[str] = []
    options = _options(engine, text)
    reading = Reading(where, _given(engine, options, notes, where))
    if engine == "vllm":
        reading.follow()
    else:  # all options, also those at their defaults
        reading.given = Given(
            {one: value for one, value in reading.given.values.items() if one.kept == "followed"}
        )
        reading.follow()
    _READ[engine](reading)
    found = re.search(_VERSIONS[engine], text)
    version = version_of(engine, found[1]) if found else None
    rules = nearest(reading.fields["engine"], version)
    reading.fields["engine"] = rules.text
    if version not in (None, rules.version):
        reading.note(
            f"{engine}@{version} has started, which is not known; rules and defaults are those of "
            f"{rules.label}"
        )
    gpu = _gpu(text)
    fields = {**reading.fields, **_settled(engine, text), **({"gpu": gpu} if gpu else {})}
    by_hand = "num_gpu_blocks" in fields or "Overriding num_gpu_blocks" in text
    sizes = _last(_SIZES[engine], text)
    figures = {name: _last(pattern, text) for name, pattern in _FIGURES[engine].items()}
    return StartupLog(
        where,
        engine,
        version,
        fields,
        {name: float(value.replace(",", "")) for name, value in figures.items() if value},
        tuple(int(size) for size in sizes.split(",")) if sizes else (),
        (*notes, *reading.notes),
        by_hand,
    )


def _what_it_is(text: str) -> str:
    """In words, what a file is that is no start-up log."""
    start = text.strip()
    running = next((engine for engine, sign in _RUNNING.items() if sign in text), None)
    if not start:
        return "is empty"
    if running is not None:
        return f"is the log of a running {running} without its start"
    if start[0] in "{[":
        return "is JSON, not a log"
    line = start.splitlines()[0]
    return f"is no start-up log of vLLM, SGLang or TensorRT-LLM: it begins with {line[:60]!r}"


def _last(pattern: str, text: str) -> str | None:
    """What the last match has in its first group that took part."""
    groups = (match.groups() for match in re.finditer(pattern, text))
    last = deque(groups, maxlen=1)
    return next((group for group in last[0] if group), None) if last else None


def _options(engine: str, text: str) -> dict[str, Any]:
    """The options that the log prints as a Python value."""
    written = _last(_OPTIONS[engine], text)
    if written is None:
        return {}
    try:
        value = _value(ast.parse(_OBJECT.sub("'object'", _ENUM.sub(r"\1", written)), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _value(node: ast.expr) -> Any:
    """A literal; the arguments of a call by name; anything else as it is written."""
    if isinstance(node, ast.Call):
        return {one.arg: _value(one.value) for one in node.keywords if one.arg}
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _given(engine: str, options: dict[str, Any], notes: list[str], where: str) -> Given:
    """Options by the engine's table; those of other versions get a note."""
    given = Given()
    unknown = []
    for name, value in _flat(engine, options):
        if value is None or name in _INTERNAL:
            continue
        try:
            option, on = find("trtllm-yaml" if engine == "trtllm" else engine, _dashes(engine) + name, where)
        except BadInput:
            unknown.append(name)
            continue
        given.values[option] = value if on else not value
    if unknown and engine == "vllm":
        notes.append(f"{where}: not known, and left out: {', '.join(unknown)}")
    return given


def _dashes(engine: str) -> str:
    return "" if engine == "trtllm" else "--"


def _flat(engine: str, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Options by name; those of TensorRT-LLM's sections with the section's name in front."""
    for name, value in options.items():
        if engine == "trtllm" and name in ("kv_cache_config", "scheduler_config") and isinstance(value, dict):
            yield from ((f"{name}.{inner}", one) for inner, one in value.items())
        else:
            yield name, value


def _settled(engine: str, text: str) -> dict[str, Any]:
    settled: dict[str, Any] = {}
    for name, pattern in _SETTLED[engine].items():
        value = _last(pattern, text)
        if value is not None:
            settled[name] = {"True": True, "False": False}.get(
                value, int(value) if value.isdecimal() else value
            )
    if engine == "vllm" and "Asynchronous scheduling is disabled" in text:
        settled["async_scheduling"] = False
    return settled


def _gpu(text: str) -> str | None:
    """The GPU's name where the log has one that is known: in the name of a table, or as drivers write it."""
    for match in _GPU.finditer(text):
        words: Sequence[str] = (match[1] or match[2]).replace("_", " ").split()
        for end in range(len(words), 0, -1):
            try:
                return find_gpu(" ".join(words[:end])).name
            except BadInput:
                continue
    return None
