"""Decisions of a scheduler as numbers, and the compressed file they are kept in.

A step is what it computed and what it left: see `Step`. A file holds a line for each seed: the checksum of
its specification, a column of numbers for each field of its steps, and one for each figure of its requests.
Columns hold the difference to what is likely (the step before, or the context that decoding leads to), so
most numbers are 0 and compress well.
"""

from __future__ import annotations

import json
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32


class Step(NamedTuple):
    """What one call of the scheduler decided; times in microseconds.

    `decode_n` requests compute one token each over `decode_ctx` tokens of context together, the longest
    `decode_max`; `prefill` are the chunks of several tokens as (tokens, tokens already there), sorted.
    `running`, `waiting` and `used_blocks` are counted after the decision. A step without any of the first
    four preempted somebody and computed nothing. `trail` is a check digit of the blocks that became findable
    or were given up since the step before (see `BlockTrail`); runs recorded without it have None.
    """

    start_us: int
    end_us: int
    decode_n: int
    decode_ctx: int
    decode_max: int
    prefill: tuple[tuple[int, int], ...]
    running: int
    waiting: int
    used_blocks: int
    trail: int | None = None


class BlockTrail:
    """Which blocks became findable and which were given up, by number and in order, as a check digit a step.

    A digit covers all that happened up to its step, so one difference shows in nearly every later step.
    """

    def __init__(self) -> None:
        self._state = 0
        self._changed = False

    def stored(self, group: int, block: int) -> None:
        """A block of a group became findable."""
        self._add(2 * (block * 64 + group))

    def removed(self, block: int) -> None:
        """A block's content was given up."""
        self._add(2 * block + 1)

    def _add(self, number: int) -> None:
        self._state = crc32(number.to_bytes(8, "little"), self._state)
        self._changed = True

    def cut(self) -> int:
        """The digit of the step just planned: 0 where nothing happened."""
        changed, self._changed = self._changed, False
        return 1 + self._state % 4095 if changed else 0


class Served(NamedTuple):
    """One request's story; times in microseconds."""

    submitted_us: int
    first_token_us: int
    finish_us: int
    cached_tokens: int
    tokens_out: int
    preemptions: int
    external_tokens: int = 0
    cancelled_us: int = -1


def disk_job(number: int) -> int:
    """How a job between host and disk is numbered among all jobs; called again, its own number."""
    return -1 - number


class Delivered(NamedTuple):
    """The end of a transfer, when the scheduler was told of it; several at one time are in their order.

    Jobs between host and disk have numbers below 0 (`disk_job`), and the time when they were done.
    """

    time_us: int
    job: int


class Decisions(NamedTuple):
    """All that was decided for one specification.

    `contents`: where recorded, for each step that computes, a digest of the blocks stored and removed. With a
    host tier, `transfers` has a digest for each step, and `delivered` the ends of its transfers; those in
    `lost` failed (of the disk's: those whose files could not be read or written).
    """

    seed: int
    checksum: str
    steps: list[Step]
    served: list[Served]
    contents: tuple[int, ...] = ()
    transfers: tuple[int, ...] = ()
    delivered: tuple[Delivered, ...] = ()
    lost: tuple[int, ...] = ()


def write(path: Path, runs: Iterable[Decisions]) -> None:
    """Writes a file of decisions; the same runs give the same bytes."""
    lines = [json.dumps(_packed(run), separators=(",", ":")) for run in runs]
    text = "\n".join(lines) + "\n"
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> Iterator[Decisions]:
    """The runs of a file, unpacked one by one: many are asked for the first only."""
    with lzma.open(path, "rt") as lines:
        for line in lines:
            yield _unpacked(json.loads(line))


def to_line(run: Decisions) -> str:
    """One run as a line of text."""
    return json.dumps(_packed(run), separators=(",", ":"))


def from_line(line: str) -> Decisions:
    """The run of a line of text."""
    return _unpacked(json.loads(line))


def _packed(run: Decisions) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {name: [] for name in Step._fields}
    before = Step(0, 0, 0, 0, 0, (), 0, 0, 0)
    for step in run.steps:
        likely = _likely(before)
        for name, column in columns.items():
            value = getattr(step, name)
            if name in likely:
                value -= likely[name]
            column.append(value)
        columns["end_us"][-1] = step.end_us - step.start_us
        before = step
    if run.steps and run.steps[0].trail is None:
        del columns["trail"]
    served = [list(column) for column in zip(*run.served, strict=True)]
    if all(one.cancelled_us < 0 for one in run.served):
        served.pop()
        if not run.transfers:
            served.pop()  # no tokens from a host
    packed = {"seed": run.seed, "checksum": run.checksum, "steps": columns, "served": served}
    if run.contents:
        packed["contents"] = run.contents
    if run.transfers:
        packed["transfers"] = run.transfers
        times = [one.time_us for one in run.delivered]
        gaps = [time - before for before, time in zip([0, *times], times, strict=False)]
        packed["delivered"] = [gaps, [one.job for one in run.delivered]]
        if run.lost:
            packed["lost"] = run.lost
    return packed


def _unpacked(line: dict[str, Any]) -> Decisions:
    columns = line["steps"]
    steps: list[Step] = []
    before = Step(0, 0, 0, 0, 0, (), 0, 0, 0)
    for row in zip(*columns.values(), strict=True):
        likely = _likely(before)
        fields: dict[str, Any] = {}
        for name, value in zip(columns, row, strict=True):
            fields[name] = value + likely[name] if name in likely else value
        fields["prefill"] = tuple((tokens, there) for tokens, there in fields["prefill"])
        fields["end_us"] += fields["start_us"]
        before = Step(**fields)
        steps.append(before)
    served = [Served(*row) for row in zip(*line["served"], strict=True)]
    gaps, jobs = line.get("delivered", ((), ()))
    delivered = tuple(Delivered(time, job) for time, job in zip(accumulate(gaps), jobs, strict=True))
    contents, transfers = tuple(line.get("contents", ())), tuple(line.get("transfers", ()))
    lost = tuple(line.get("lost", ()))
    return Decisions(line["seed"], line["checksum"], steps, served, contents, transfers, delivered, lost)


class EventDigests:
    """Digests of KV events, step by step, with all fields; hashes are numbered as they first come."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._of_device: list[Any] = []
        self._of_host: list[Any] = []
        self._happened = self._of_device

    def medium(self, name: str) -> None:
        """Takes note of the tier that the next event is about; those of the host come after all others."""
        self._happened = self._of_host if name == "CPU" else self._of_device

    def stored_event(
        self, hashes: Sequence[object], parent: object, tokens: int, block_size: int, group: int
    ) -> None:
        """Takes note of a `BlockStored`; `parent` is None at the start of a sequence."""
        self._happened += [group, block_size, tokens, -1 if parent is None else (parent,)]
        self._happened += [(content,) for content in hashes]

    def removed_event(self, hashes: Sequence[object], group: int) -> None:
        """Takes note of a `BlockRemoved`."""
        self._happened += [-2, group, *((content,) for content in hashes)]

    def digest(self) -> int:
        """A number below 2**8 for all since the last digest; 0 where there was nothing."""
        if not self._of_device and not self._of_host:
            return 0
        text = self._text(self._of_device)
        if self._of_host:
            text += ";" + self._text(self._of_host)
        return zlib.crc32(text.encode()) & 0xFF or 1

    def _text(self, happened: list[Any]) -> str:
        """Events as numbers; they are forgotten."""
        numbers = [self._number(*one) if isinstance(one, tuple) else one for one in happened]
        happened.clear()
        return ",".join(map(str, numbers))

    def _number(self, content: object) -> int:
        return self._numbers.setdefault(content, len(self._numbers))


def _likely(before: Step) -> dict[str, int]:
    """What the step after one would be if everybody went on decoding."""
    return {
        "start_us": before.end_us,
        "end_us": 0,
        "decode_n": before.decode_n,
        "decode_ctx": before.decode_ctx + before.decode_n,
        "decode_max": before.decode_max + 1,
        "running": before.running,
        "waiting": before.waiting,
        "used_blocks": before.used_blocks,
    }


def main() -> None:
    """Packs the lines on standard input into the file named: `python decisions.py FILE < lines`."""
    write(Path(sys.argv[1]), [from_line(line) for line in sys.stdin])


if __name__ == "__main__":
    main()
