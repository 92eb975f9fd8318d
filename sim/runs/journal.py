"""Journal of a live server: what happened, line by line, from which a recorded run is made.

A recorded run needs to know of each request when it ended, so it is written when all is over. A server may
be killed at any time. So it writes a journal into the run's folder, beside `meta.json`: JSON lines in files
`journal-000001.jsonl`, and so on; all but the last may be gzipped. `unfold` makes a recorded run's files of
them, and adds `"cut": true` to the meta data where the last line does not say that the journal was closed. A
last line that was cut short is ignored. Requests that had not ended by then have no end. The files are for
their owner alone: they tell of other people's requests.

    ["s", arrival_ns, at_ns, input_tokens, output_tokens, priority, adapter, salt, blocks, tail]   submitted
    ["t", start_ns, end_ns, decode_n, decode_ctx, decode_max, running, waiting, used, prefill, admitted] step
    ["e", row, state, first_token_ns, at_ns, output tokens so far, reason, blocks, cached tokens]   ended
    ["i", at_ns]   a plan that found nothing to compute
    ["g", [[row, accepted, drafted], ...]]   draft tokens: accepted in the next step, drafted after it; or -1
    ["z"]   the journal was closed
    ["x", job, told_ns, kind, blocks, bytes, queued_ns, start_ns, end_ns, lost]   a transfer that ended

Rows number submissions from 0. `blocks` names the full blocks of the prompt (at the end: of prompt and
output) by 64-bit digests of all tokens up to their ends, and `tail` the tokens after them. `admitted` lists
`[row, cached tokens]` of requests that ran for the first time.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from pagecast.sim.core.errors import BadInput
from pagecast.sim.runs.transfers import FILE as TRANSFERS
from pagecast.sim.runs.transfers import RecordedTransfer

NS = 1_000_000_000
FINISHED, CANCELLED, REJECTED = "finished", "cancelled", "rejected"
_FLUSH_S = 0.25
_MODE = 0o600
_Span = tuple[int, int, int]  # content, offset, tokens
_At = tuple[int, int]  # content, offset
_COLUMNS = (
    *("index", "arrival_s", "submitted_s", "input_tokens", "output_tokens", "first_token_s", "finish_s"),
    *("cached_tokens", "tokens_out", "cancelled_s", "reason"),
)


class JournalWriter:
    """Appends to a journal in `folder`, which gets `meta.json` at once.

    What is written reaches the operating system within a quarter of a second, if `flush` is called that
    often. A file longer than `segment_bytes` is closed, gzipped in the background, and followed by another.
    Errors: BadInput where the folder can't be written or holds a run already.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], *, segment_bytes: int = 64 << 20) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._segment = 0
        self._size = 0
        self._flushed_s = time.monotonic()
        self._lines: list[str] = []
        self._zipping: list[threading.Thread] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise BadInput(f"{folder} is not empty; give a new folder")
            with _private(folder / "meta.json", "w") as out:
                out.write(json.dumps(meta, indent=1) + "\n")
            self._file = self._open_next()
        except OSError as error:
            raise BadInput(f"{folder}: can't be written ({error.strerror or error})") from None

    def add(self, line: list[Any]) -> None:
        """Appends one line."""
        self._lines.append(json.dumps(line, separators=(",", ":")))
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Hands what there is to the operating system. Errors: OSError, after which nothing may be added."""
        self._flushed_s = time.monotonic()
        if not self._lines:
            return
        text = "\n".join(self._lines) + "\n"
        self._lines = []
        self._file.write(text)
        self._file.flush()
        self._size += len(text)
        if self._size >= self._segment_bytes:
            closed = self._path
            self._file.close()
            self._file = self._open_next()
            thread = threading.Thread(target=_zip, args=(closed,))
            thread.start()
            self._zipping = [one for one in (*self._zipping, thread) if one.is_alive()]

    def close(self) -> None:
        """Ends the journal and puts a recorded run's files in its place. Errors: OSError."""
        self.add(["z"])
        self.flush()
        self._file.close()
        for thread in self._zipping:
            thread.join()
        place = self.folder / ".unfolding"
        place.mkdir(exist_ok=True)
        try:
            unfold(self.folder, place)
        except BadInput:  # nothing was served: the journal is all there is
            shutil.rmtree(place, ignore_errors=True)
            return
        self._move_in(place)

    def replace(self, write: Callable[[Path], object]) -> None:
        """Ends the journal and puts what `write` writes to a folder in its place.

        Raises what `write` raises; the journal is then what there is.
        """
        self.flush()
        self._file.close()
        for thread in self._zipping:
            thread.join()
        place = self.folder / ".unfolding"
        write(place)
        self._move_in(place)

    def _move_in(self, place: Path) -> None:
        for file in place.iterdir():
            file.chmod(_MODE)
            os.replace(file, self.folder / file.name)
        place.rmdir()
        for path in segments(self.folder):
            path.unlink()

    def _open_next(self) -> TextIO:
        self._segment += 1
        self._size = 0
        self._path = self.folder / f"journal-{self._segment:06}.jsonl"
        return _private(self._path, "a")


def _private(path: Path, mode: str) -> TextIO:
    """Opens a file that only its owner may read."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if mode == "a" else os.O_TRUNC)
    return os.fdopen(os.open(path, flags, _MODE), mode, encoding="utf-8")  # type: ignore[return-value]


def _zip(path: Path) -> None:
    """Puts a gzipped file in the place of a plain one; whole at any time."""
    part = path.with_suffix(".jsonl.gz.part")
    with path.open("rb") as plain, gzip.open(part, "wb", compresslevel=4) as zipped:
        shutil.copyfileobj(plain, zipped)
    part.chmod(_MODE)
    os.replace(part, path.with_suffix(".jsonl.gz"))
    path.unlink()


def segments(folder: Path) -> list[Path]:
    """The files of a folder's journal in order; none where it has no journal."""
    names: dict[str, Path] = {}
    for path in sorted(folder.glob("journal-*.jsonl*")):
        if path.suffix == ".part":
            continue
        # While a file is gzipped, both forms are there: the gzipped one appears when it is whole.
        names[path.name.split(".")[0]] = path
    return [names[name] for name in sorted(names)]


def unfold(folder: Path, place: Path) -> None:
    """Writes a recorded run made of a folder's journal to another folder.

    Errors: BadInput where a line can't be read, and where no step was recorded.
    """
    run = _RunBuilder()
    for path, number, line in _lines(folder):
        try:
            run.take(line)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            raise BadInput(f"{path} line {number}: can't be read ({error})") from None
    if not run.steps:
        raise BadInput(f"{folder}: its journal holds no steps")
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    run.write(place, meta)


def _lines(folder: Path) -> Iterator[tuple[Path, int, Any]]:
    paths = segments(folder)
    for path in paths:
        with _opened(path) as text:
            for number, line in enumerate(text, 1):
                if path is paths[-1] and not line.endswith("\n"):
                    return  # cut short
                try:
                    yield path, number, json.loads(line)
                except ValueError as error:
                    raise BadInput(f"{path} line {number}: can't be read ({error})") from None


def _opened(path: Path) -> TextIO:
    """A file of a journal; its gzipped form where that has just taken its place."""
    if path.suffix != ".gz":
        try:
            return path.open(encoding="utf-8")
        except FileNotFoundError:
            path = path.with_suffix(".jsonl.gz")
    return gzip.open(path, "rt", encoding="utf-8")


class _RunBuilder:
    """A recorded run in the making."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self._submissions: list[list[Any]] = []
        self._ended: dict[int, list[Any]] = {}
        self._cached: dict[int, int] = {}
        self._idle: list[int] = []
        self._drafts: dict[int, tuple[list[int], list[int]]] = {}  # accepted and drafted, by row
        self._transfers: list[RecordedTransfer] = []
        self._closed = False

    def take(self, line: list[Any]) -> None:
        """Takes one line of the journal."""
        kind, *values = line
        if kind == "s":
            self._submissions.append(values)
        elif kind == "t":
            self.steps.append(values)
            for row, cached in values[9]:
                self._cached[row] = cached
        elif kind == "e":
            self._ended[values[0]] = values
            self._cached[values[0]] = values[7]
        elif kind == "i":
            self._idle.append(values[0])
        elif kind == "g":
            for row, *counts in values[0]:
                for count, column in zip(counts, self._drafts.setdefault(row, ([], [])), strict=True):
                    if count >= 0:
                        column.append(count)
        elif kind == "z":
            self._closed = True
        elif kind == "x":
            self._transfers.append(RecordedTransfer(*values))
        else:
            raise ValueError(f"{kind!r} is not known")

    def write(self, place: Path, meta: dict[str, Any]) -> None:
        """Writes the four files."""
        if self._idle:
            meta = {**meta, "idle_plans_s": [time_ns / NS for time_ns in self._idle]}
        if not self._closed:
            meta = {**meta, "cut": True}
        (place / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        blocks = int(meta["usable_blocks"])
        with _zipped(place / "steps.jsonl.gz") as out:
            for step in self.steps:
                out.write(json.dumps(_step(step, blocks)) + "\n")
        with _zipped(place / "inputs.jsonl.gz") as out:
            for line in self._inputs(int(meta["config"]["block_size"]), int(meta.get("key_lookahead", 0))):
                out.write(json.dumps(line) + "\n")
        if self._transfers:
            with _zipped(place / TRANSFERS) as out:
                for transfer in self._transfers:
                    out.write(json.dumps(transfer.line()) + "\n")
        with _zipped(place / "requests.csv.gz") as out:
            table = csv.writer(out, lineterminator="\n")
            table.writerow(_COLUMNS)
            for row in range(len(self._submissions)):
                table.writerow(self._request(row))

    def _request(self, row: int) -> list[Any]:
        arrival, at, prompt, output = self._submissions[row][:4]
        end = self._ended.get(row)
        first = finish = cancelled = None
        out = 0
        reason = ""
        if end is not None:
            _, state, first_ns, at_ns, out, reason, _, _ = end
            first = first_ns / NS if first_ns >= 0 else None
            finish = at_ns / NS if state == FINISHED else None
            cancelled = at_ns / NS if state == CANCELLED else None
        cached = self._cached.get(row, 0)
        return [row, arrival / NS, at / NS, prompt, output, first, finish, cached, out, cancelled, reason]

    def _inputs(self, block_size: int, lookahead: int) -> Iterator[dict[str, Any]]:
        """The requests as they were submitted, prompts as spans: equal tokens have equal names."""
        names = _Names(block_size, lookahead)
        for row, (arrival, _, prompt, output, priority, adapter, salt, blocks, tail) in enumerate(
            self._submissions
        ):
            end = self._ended.get(row)
            every = end[6] if end is not None and end[6] else blocks
            own, generated = names.add(prompt, output, (blocks[-1] if blocks else 0, tail), every)
            line = {"arrival_s": arrival / NS, "input_tokens": prompt, "output_tokens": output}
            line |= {"priority": priority} if priority else {}
            line |= {name: text for name, text in (("adapter", adapter), ("salt", salt)) if text}
            if self._drafts:
                accepted, drafted = self._drafts.get(row, ([], []))
                line |= {
                    "drafts": " ".join(map(str, drafted)),
                    "accepted_drafts": " ".join(map(str, accepted)),
                }
            yield {**line, "spans": own, "output_content": generated[0], "output_offset": generated[1]}


class _Names:
    """Names for the tokens of requests, told by the digests of their blocks of `block_size` tokens.

    A request's tokens are a text of its own, `row`, except for the blocks that it has in common with an
    earlier request, which keep the names they have there. `lookahead`: tokens after a block that its digest
    covers.
    """

    def __init__(self, block_size: int, lookahead: int) -> None:
        self._block_size = block_size
        self._lookahead = lookahead
        self._spans: list[list[_Span]] = []  # of prompt and output of each row
        self._first: dict[int, int] = {}  # the row in which a block was named
        self._whole: dict[tuple[int, int], int] = {}  # the row in which a prompt was

    def add(
        self, prompt: int, output: int, key: tuple[int, int], every: list[int]
    ) -> tuple[list[_Span], _At]:
        """The next row's prompt as spans, and where its output lies.

        `key` tells whole prompts apart; `every`: the digests of the blocks, of the output's as well.
        """
        row = len(self._spans)
        own, generated = self._name(row, prompt, key, every)
        self._spans.append([*own, (*generated, output)])
        for digest in every:
            self._first.setdefault(digest, row)
        return own, generated

    def _name(self, row: int, prompt: int, key: tuple[int, int], every: list[int]) -> tuple[list[_Span], _At]:
        spans, first = self._spans, self._first
        common = 0
        while common < len(every) and every[common] in first:
            common += 1
        twin = self._whole.setdefault(key, row)
        if twin != row and self._shared(common) > prompt:
            # The same prompt was answered with the same tokens before: the answer keeps its name too.
            other = spans[first[every[common - 1]]]
            content, offset, _ = _cut_from(other, prompt)
            return _cut(other, prompt), (content, offset)
        common = min(common, max(prompt - self._lookahead, 0) // self._block_size)
        shared = self._shared(common)
        own = _cut(spans[first[every[common - 1]]], shared) if common else []
        if shared < prompt:
            if twin != row:
                return _cut(spans[twin], prompt), (row, prompt)
            own = [*own, (row, shared, prompt - shared)]
        return own, (row, prompt)

    def _shared(self, blocks: int) -> int:
        """Tokens that are equal where so many blocks are."""
        return blocks * self._block_size + self._lookahead if blocks else 0


def _cut(spans: list[_Span], length: int) -> list[_Span]:
    """The first `length` tokens of a text."""
    parts = []
    for content, offset, size in spans:
        if length <= 0:
            break
        parts.append((content, offset, min(size, length)))
        length -= size
    return parts


def _cut_from(spans: list[_Span], start: int) -> _Span:
    """The piece of a text in which token `start` lies, from there on."""
    for content, offset, size in spans:
        if start < size:
            return content, offset + start, size - start
        start -= size
    raise ValueError("the text is shorter")


def _step(values: list[Any], num_blocks: int) -> dict[str, Any]:
    start, end, decode_n, decode_ctx, decode_max, running, waiting, used, prefill, _ = values
    return {
        "start_s": start / NS,
        "end_s": end / NS,
        "sched_s": 0.0,
        "decode_n": decode_n,
        "decode_ctx": decode_ctx,
        "decode_max": decode_max,
        "running": running,
        "waiting": waiting,
        "prefill": prefill,
        "kv_usage": used / num_blocks,
    }


def _zipped(path: Path) -> TextIO:
    return gzip.open(path, "wt", encoding="utf-8", compresslevel=6, newline="")
