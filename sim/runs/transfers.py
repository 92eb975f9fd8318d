"""Recorded transfers between the device and its host tier.

A run has them in `transfers.jsonl.gz`, one per line, in the order in which the scheduler was told of their
ends. Times are seconds of the run's clock:

    {"job": 3, "told_s": 1.0253, "kind": "load", "blocks": 40, "bytes": 94371840,
     "queued_s": 1.02, "start_s": 1.0201, "end_s": 1.0219}

Decisions need `job` and `told_s` (and `lost`, true where a transfer failed). The rest is for link costs.
`queued_s`: the device was given the job, and may have been at work on others still. With a disk behind the
host, jobs between the two have the `kind` `disk` and the time when they were done; nothing else is known of
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.recorded_requests import HUGE, LATEST_S, has, lines

FILE = "transfers.jsonl.gz"
LOAD, STORE = "load", "store"
DISK = "disk"  # between host and disk; `job` is numbered for itself
_COUNTS = ["job", "blocks", "bytes"]
_TIMES = ["told", "queued", "start", "end"]
_NS = 1_000_000_000


class RecordedTransfer(NamedTuple):
    """The end of job number `job`, of which the scheduler was told at `told_ns`.

    `blocks` of `bytes` together were loaded from the host tier or stored there; `kind` is empty where nobody
    recorded that. `lost`: it failed.
    """

    job: int
    told_ns: int
    kind: str = ""
    blocks: int = 0
    bytes: int = 0
    queued_ns: int = 0
    start_ns: int = 0
    end_ns: int = 0
    lost: bool = False

    @property
    def bytes_per_s(self) -> float:
        """The rate of the copy itself."""
        return self.bytes * _NS / max(self.end_ns - self.start_ns, 1)

    def line(self) -> dict[str, Any]:
        """As a line of the file."""
        line: dict[str, Any] = {"job": self.job, "told_s": self.told_ns / _NS}
        if self.kind == DISK:
            line["kind"] = DISK
        elif self.kind:
            line |= {"kind": self.kind, "blocks": self.blocks, "bytes": self.bytes}
            times = {"queued_s": self.queued_ns, "start_s": self.start_ns, "end_s": self.end_ns}
            line |= {name: time / _NS for name, time in times.items()}
        return {**line, "lost": True} if self.lost else line


def read_transfers(folder: Path) -> tuple[RecordedTransfer, ...]:
    """The transfers of a recorded run; none where it has no such file. Errors: BadInput naming the line."""
    path = folder / FILE
    if not has(folder, FILE):
        return ()
    transfers = []
    for number, line in lines(path):
        try:
            transfers.append(_transfer(line))
        except ValueError as error:
            raise BadInput(f"{path} line {number}: {error}") from None
    return tuple(transfers)


def _transfer(line: dict[str, Any]) -> RecordedTransfer:
    kind = line.get("kind", "")
    if kind not in ("", LOAD, STORE, DISK):
        raise ValueError(f"'kind' is {kind!r}, must be load, store or disk")
    timed = kind in (LOAD, STORE)
    counts = _COUNTS if timed else _COUNTS[:1]
    times = _TIMES if timed else _TIMES[:1]
    fields: dict[str, int] = {}
    for name in counts:
        value: Any = line.get(name)
        if type(value) is not int or not 0 <= value < HUGE:
            raise ValueError(f"'{name}' is {value!r}, must be a whole number of at least 0")
        fields[name] = value
    for name in times:
        seconds: Any = line.get(f"{name}_s")
        if type(seconds) not in (int, float) or not 0 <= seconds < LATEST_S:
            raise ValueError(f"'{name}_s' is {seconds!r}, must be a number of at least 0")
        fields[f"{name}_ns"] = round(seconds * _NS)
    return RecordedTransfer(**fields, kind=kind, lost=bool(line.get("lost")))
