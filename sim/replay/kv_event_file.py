"""File of KV events: one JSON object per line, with vLLM's names of events and fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagecast.sim.core.kv_events import KvEvent, KvEventStream

_FLUSH_EVENTS = 1 << 14


class KvEventFile:
    """Writes what a stream of KV events gets to a file, in pieces while the replay goes on.

    A line has `step` (see the replay's `steps.parquet` for its time), `type` and the event's fields. Hashes
    are hexadecimal; fields that say nothing (None) are left out.
    """

    def __init__(self, path: Path, stream: KvEventStream) -> None:
        self._stream = stream
        self._file = path.open("w", encoding="utf-8")

    def flush(self, *, at_least: int = _FLUSH_EVENTS) -> None:
        """Writes the events so far, where there are at least so many."""
        if len(self._stream.events) < at_least:
            return
        steps, events = self._stream.take_with_steps()
        for step, event in zip(steps, events, strict=True):
            self._file.write(json.dumps({"step": step, **as_fields(event)}) + "\n")

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self.flush(at_least=0)
        self._file.close()


def as_fields(event: KvEvent) -> dict[str, Any]:
    """An event as vLLM's field names and plain values: hashes are hexadecimal."""
    fields: dict[str, Any] = {"type": type(event).__name__}
    for name, value in event._asdict().items():
        if value is None:
            continue
        if name == "block_hashes":
            value = [each.hex() for each in value]
        elif name == "parent_block_hash":
            value = value.hex()
        fields[name] = value
    return fields
