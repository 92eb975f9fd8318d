"""Traces from ServeGen's client parameters: a published workload as the sum of its clients.

Each client has `chunk-N-trace.csv` (`window_start_s,rate,cv,pattern,arg1,arg2`, no header: arrivals in
windows of 600 s; the arguments are the shape and scale that rate and cv already give) and
`chunk-N-dataset.json` (distributions of input and output tokens from some time on). Source:
github.com/alibaba/ServeGen ("ServeGen: Workload Characterization and Generation of Large Language Model
Serving in Production", 2025).
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrays import Floats
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.lengths import Empirical, tokens
from pagecast.traces.schema import Trace, table
from pagecast.traces.seeds import checked_seed
from pagecast.traces.source import MAX_BYTES, MAX_LINE_BYTES, open_source

_WINDOW_S = 600.0
_KINDS = {"": "poisson", "gamma": "gamma", "weibull": "weibull", "poisson": "poisson"}
_PAIR = re.compile(r"([0-9.eE+-]+)\s*:\s*([0-9.eE+-]+)")
_FILE = re.compile(r"(?P<client>[^/\\]+)-(?P<kind>trace\.csv|dataset\.json)$")


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals of one client from `start_s` to before `end_s`; None where it sends nothing."""

    start_s: float
    end_s: float
    arrivals: ArrivalProcess | None


@dataclass(frozen=True, slots=True)
class Client:
    """One client: its windows in order, and from which time on its lengths follow which laws."""

    name: str
    windows: tuple[Window, ...]
    lengths: tuple[tuple[float, Empirical, Empirical], ...]


def load_clients(path: str | Path, max_bytes: int = MAX_BYTES) -> list[Client]:
    """Reads the clients in an archive (.tar, .tar.gz, .tar.zst) or a folder, by name.

    Raises BadInput for a client without one of its two files, and for values that make no sense.
    """
    files: dict[str, dict[str, str]] = {}
    for name, text in _files(Path(path), max_bytes):
        if match := _FILE.search(name):
            files.setdefault(match["client"], {})[match["kind"]] = text
    if not files:
        raise BadInput(f"{path}: no ServeGen clients in it (chunk-N-trace.csv, chunk-N-dataset.json)")
    clients = []
    for name in sorted(
        files, key=lambda name: [int(part) if part.isdigit() else 0 for part in re.split(r"(\d+)", name)]
    ):
        for kind in ("trace.csv", "dataset.json"):
            if kind not in files[name]:
                raise BadInput(f"{path}: client {name} lacks {name}-{kind}; fetch the archive again")
        windows = _windows(f"{path}, {name}-trace.csv", files[name]["trace.csv"])
        lengths = _lengths(f"{path}, {name}-dataset.json", files[name]["dataset.json"])
        if not lengths and any(window.arrivals for window in windows):
            raise BadInput(
                f"{path}: client {name} sends requests but has no lengths; fetch the archive again"
            )
        clients.append(Client(name, windows, lengths))
    return clients


def servegen(
    clients: list[Client],
    *,
    duration_s: float,
    start_s: float = 0.0,
    rate: float | None = None,
    seed: int = 0,
    name: str = "servegen",
) -> Trace:
    """The requests that these clients send from `start_s` of their day on, for `duration_s` seconds.

    With `rate`, every client's rate is multiplied by one factor so that together they send that many a
    second on average. Input and output lengths are drawn independently, as they are published; prompts
    are unique. Raises BadInput for a time that the parameters don't cover or in which nothing arrives.
    """
    end_s = start_s + duration_s
    covered = max(window.end_s for client in clients for window in client.windows)
    if not (0 <= start_s < end_s <= covered):
        raise BadInput(f"from {start_s:g} s to {end_s:g} s: the parameters cover 0 to {covered:g} s")
    expected = expected_requests(clients, start_s, end_s)
    if expected <= 0:
        raise BadInput(f"no client sends anything from {start_s:g} s to {end_s:g} s; choose another time")
    factor = 1.0 if rate is None else rate * duration_s / expected
    parts: list[Floats] = [np.empty((0, 3))]
    for number, client in enumerate(clients):
        rng = np.random.default_rng([checked_seed(seed), number])
        parts += [_play(client, window, start_s, end_s, factor, rng) for window in client.windows]
    rows = np.concatenate(parts)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    if not len(rows):
        raise BadInput(
            f"nothing arrived in {duration_s:g} s at {expected / duration_s:g} per second; make it longer"
        )
    note = "input and output lengths are drawn independently of each other; prompts share nothing"
    columns = {"arrival_s": rows[:, 0] - start_s, "input_tokens": rows[:, 1], "output_tokens": rows[:, 2]}
    return Trace(name, table(columns), notes=(note,))


def expected_requests(clients: list[Client], start_s: float, end_s: float) -> float:
    """How many requests the parameters give for a time, on average."""
    return sum(
        window.arrivals.rate * max(0.0, min(end_s, window.end_s) - max(start_s, window.start_s))
        for client in clients
        for window in client.windows
        if window.arrivals is not None
    )


def _play(
    client: Client, window: Window, start_s: float, end_s: float, factor: float, rng: np.random.Generator
) -> Floats:
    """Arrival, input and output tokens of what a client sends in the part of a window asked for."""
    begin, end = max(start_s, window.start_s), min(end_s, window.end_s)
    if begin >= end or window.arrivals is None:
        return np.empty((0, 3))
    law = ArrivalProcess(window.arrivals.kind, window.arrivals.rate * factor, window.arrivals.cv)
    times = begin + law.times_s(rng, duration_s=end - begin)
    candidates = [lengths for lengths in client.lengths if lengths[0] <= window.start_s] or list(
        client.lengths[:1]
    )
    _, inputs, outputs = candidates[-1]
    return np.stack([times, tokens(inputs, len(times), rng), tokens(outputs, len(times), rng)], axis=1)


def _files(path: Path, max_bytes: int) -> Iterator[tuple[str, str]]:
    """Names and texts of the clients' files."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if _FILE.search(file.name):
                yield file.name, open_source(file, max_bytes).text()
        return
    source = open_source(path, max_bytes)
    try:
        with source.open() as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not member.isfile() or not _FILE.search(member.name):
                    continue
                if member.size > MAX_LINE_BYTES:
                    raise source.fail(f"{member.name} has {member.size:,} bytes; that is no client")
                data = archive.extractfile(member)
                yield member.name, data.read().decode() if data else ""
    except (tarfile.TarError, UnicodeDecodeError) as error:
        raise source.fail(f"no readable tar archive ({error}); fetch it again") from None


def _windows(where: str, text: str) -> tuple[Window, ...]:
    rows: list[tuple[float, float, float, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split(",")
        try:
            start, rate, cv = (float(field) for field in fields[:3])
            rows.append((start, rate, cv, _KINDS[fields[3].strip().lower()]))
        except (ValueError, IndexError, KeyError):
            raise BadInput(
                f"{where}, line {number}: expected window_start_s,rate,cv,pattern,arg1,arg2 "
                "with pattern Gamma, Weibull or none; correct the line"
            ) from None
        if not (rate >= 0 and cv >= 0 and np.isfinite(rate + cv)):
            raise BadInput(f"{where}, line {number}: rate and cv must be 0 or more; correct the line")
    starts = [row[0] for row in rows]
    if not rows or any(b <= a for a, b in pairwise(starts)):
        raise BadInput(f"{where}: needs windows in rising order of their start; correct the file")
    ends = [*starts[1:], starts[-1] + _WINDOW_S]
    return tuple(
        Window(start, end, ArrivalProcess(kind if cv >= 0.05 else "even", rate, cv) if rate > 0 else None)
        for (start, rate, cv, kind), end in zip(rows, ends, strict=True)
    )


def _lengths(where: str, text: str) -> tuple[tuple[float, Empirical, Empirical], ...]:
    """The laws of input and output lengths by the time they begin to hold; empty ones are left out."""
    try:
        document: dict[str, Any] = json.loads(text)
        laws = [
            (float(start), _law(where, laws["input_tokens"]), _law(where, laws["output_tokens"]))
            for start, laws in document.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(
            f"{where}: expected times, each with input_tokens and output_tokens; fetch it again"
        ) from None
    periods = tuple(
        (start, inputs, outputs)
        for start, inputs, outputs in sorted(laws, key=lambda law: law[0])
        if inputs and outputs
    )
    return periods


def _law(where: str, entry: str | dict[str, float]) -> Empirical | None:
    """A distribution written as `{length: probability, ...}`; None where it is empty."""
    text = entry if isinstance(entry, str) else json.dumps(entry).replace('"', "")
    pairs = _PAIR.findall(text)
    if len(pairs) != text.count(":"):
        raise ValueError
    values = tuple(float(length) for length, _ in pairs)
    weights = tuple(float(weight) for _, weight in pairs)
    if not pairs:
        return None
    if min(values) < 0 or min(weights) < 0 or not sum(weights) > 0:
        raise BadInput(f"{where}: lengths and probabilities must be 0 or more; fetch it again")
    return Empirical(values, weights)
