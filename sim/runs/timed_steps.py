"""Times of single batches, as tools measure them without a scheduler: shapes and milliseconds.

Read are `vllm bench forward --output-json` (0.33: the device time of exact batches, as CUDA graphs), and the
tables of `aisimulate onboard collect-fpm` (`fpm_forward_perf`, parquet or CSV: whole iterations of an engine,
of batches whose requests are alike).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.documents import read_json

_MOST_BYTES = 1 << 28
_FORWARD = ("case", "requests", "median_us")
_FPM = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens", "latency_ms")
_CELL = ("model_path", "system", "backend", "backend_version", "kv_cache_dtype", "gemm_quant_mode")
_SHARDS = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
_REMEDY = (
    "give the --output-json of `vllm bench forward`, or the fpm_forward_perf table of `aisimulate onboard`"
)


@dataclass(frozen=True)
class TimedSteps:
    """Batches and how long each took, in seconds. `with_host`: the host's time of a step is part of it."""

    name: str
    batches: tuple[Batch, ...]
    seconds: tuple[float, ...]
    with_host: bool
    notes: tuple[str, ...] = ()


def read_timed_steps(path: str | Path, tensor_parallel_size: int = 1) -> TimedSteps:
    """Reads a file; of a table with several deployments the one of so many GPUs. Errors: BadInput."""
    where = Path(path)
    if where.suffix == ".json":
        return _forward(where, read_json(where, _MOST_BYTES, _REMEDY))
    try:
        table = pd.read_parquet(where) if where.suffix == ".parquet" else pd.read_csv(where)
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: is no table ({error}); {_REMEDY}") from None
    return _fpm(where, table, tensor_parallel_size)


def _forward(where: Path, document: Any) -> TimedSteps:
    if not isinstance(document, list) or not document or not all(isinstance(one, dict) for one in document):
        raise BadInput(f"{where}: is no list of cases; {_REMEDY}")
    batches, seconds, drafting, drafters = [], [], 0, 0
    for number, case in enumerate(document, 1):
        missing = next((name for name in _FORWARD if name not in case), None)
        if missing is not None:
            raise BadInput(f"{where}: case {number}: field {missing} is missing; {_REMEDY}")
        try:
            batch = _batch(case["requests"])
            took = float(case["median_us"]) / 1e6
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{where}: case {number}: is not as the tool writes it ({error})") from None
        if not 0 < took < math.inf:
            raise BadInput(f"{where}: case {number}: median_us is {case['median_us']}; it must be above 0")
        ranks = case.get("ranks")
        drafters += bool(
            isinstance(ranks, list) and ranks and isinstance(ranks[0], dict) and "drafter" in ranks[0]
        )
        if batch is None:
            drafting += 1
            continue
        batches.append(batch)
        seconds.append(took)
    if drafters:
        raise BadInput(f"{where}: {drafters} cases hold a drafter's time too; measure with --exclude-drafter")
    if not batches:
        raise BadInput(f"{where}: no case without draft tokens; measure plain decode and prefill steps too")
    notes = (f"{where}: {drafting} cases with draft tokens are left out",) if drafting else ()
    return TimedSteps(where.stem, tuple(batches), tuple(seconds), False, notes)


def _batch(requests: list[Mapping[str, Any]]) -> Batch | None:
    """The batch of a case; None where it verifies draft tokens. Errors: KeyError, ValueError."""
    shapes = []
    for request in requests:
        query, kv = int(request["query_len"]), int(request["kv_len"])
        if not 1 <= query <= kv:
            raise ValueError(f"query_len {query}, kv_len {kv}")
        if int(request.get("num_draft_tokens", 0)):
            return None
        shapes.append((query, kv - query))
    if not shapes:
        raise ValueError("no requests")
    decodes = [past for query, past in shapes if query == 1 and past]
    prompts = tuple((query, past) for query, past in shapes if query > 1 or not past)
    return Batch(len(decodes), sum(decodes), max(decodes, default=0), prompts)


def _fpm(where: Path, table: pd.DataFrame, tensor_parallel_size: int) -> TimedSteps:
    missing = [name for name in _FPM if name not in table]
    if missing:
        raise BadInput(f"{where}: columns {', '.join(missing)} are missing; {_REMEDY}")
    for name in _SHARDS:
        if name in table:
            # What is split over experts is split over the GPUs of a replica.
            alike = table[name].isin([1, tensor_parallel_size]) if name.startswith("moe") else None
            wanted = tensor_parallel_size if name == "tp" else 1
            table = table[(table[name] == wanted) if alike is None else alike]
    if not len(table):
        raise BadInput(f"{where}: has no rows of {tensor_parallel_size} GPUs without other ways of sharding")
    cells = table[[name for name in (*_CELL, "moe_tp", "moe_ep") if name in table]].drop_duplicates()
    if len(cells) > 1:
        several = [str(name) for name in cells if cells[name].nunique() > 1]
        raise BadInput(
            f"{where}: rows of {len(cells)} deployments, by {', '.join(several)}; keep those of one"
        )
    decode = table["workload_kind"] == "decode"
    if not (decode | (table["workload_kind"] == "prefill")).all() or not (table["latency_ms"] > 0).all():
        raise BadInput(f"{where}: a row is neither prefill nor decode, or takes no time; {_REMEDY}")
    rows = table[list(_FPM)].itertuples(index=False)
    batches = tuple(_alike(kind, int(n), int(tokens), int(read)) for kind, n, tokens, read, _ in rows)
    of = ", ".join(str(value) for value in cells.iloc[0]) if len(cells.columns) else "unnamed"
    return TimedSteps(
        where.stem, batches, tuple((table["latency_ms"] / 1e3).tolist()), True, (f"{where}: {of}",)
    )


def _alike(kind: str, requests: int, tokens: int, read: int) -> Batch:
    """A batch of requests that are as alike as their sums let them be."""
    past = _shares(read, requests)
    if kind == "decode":
        return Batch(requests, read, max(past), ())
    return Batch(0, 0, 0, tuple(zip(_shares(tokens, requests), past, strict=True)))


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]
