"""Source of a trace: a file of any compression, opened with limits on what it may hold.

Compression is told by the first bytes, not the name. Everything is streamed: a decompression bomb or a
line of gigabytes ends in one line of error before it fills memory.
"""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard
from pagecast.sim.core.errors import BadInput

MIB = 1 << 20
MAX_BYTES = 2 << 30  # decompressed
MAX_LINE_BYTES = 64 * MIB
MAX_DOCUMENT_BYTES = 1 << 30
MOST_EXPANSION = 200  # recorded traces pack to a 3rd to a 50th
_FREE_BYTES = 32 * MIB  # unpacked, before expansion counts
HEAD_BYTES = MIB
_ZSTD_WINDOW_BYTES = 128 * MIB
_ZSTD_FEED_BYTES = 4096  # one call expands by at most 32,768 times
_GZIP, _ZSTD, _ZIP = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Source:
    """A file to read, with its first MiB (decompressed) in `head`, and what it was recognised as.

    `progress` is called now and then with the number of bytes read from the file.
    """

    path: Path
    max_bytes: int
    head: bytes
    format: str = ""
    progress: Callable[[int], object] | None = None

    def fail(self, problem: str, line: int | None = None, field: str | None = None) -> BadInput:
        """The error to raise: file, line and field, then what is wrong and what to do."""
        where = f"{self.path} (read as {self.format})" if self.format else str(self.path)
        if line is not None:
            where += f", line {line}"
        if field is not None:
            where += f", field {field}"
        return BadInput(f"{where}: {problem}")

    def open(self) -> io.BufferedReader:
        """A fresh stream of the decompressed bytes; raises BadInput when it is broken or too long."""
        return _open(self.path, self.max_bytes, self.progress)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Line numbers (from 1) and lines, their ends included."""
        number = 0
        with self.open() as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise self.fail(f"longer than {MAX_LINE_BYTES // MIB} MiB{_remedy(line)}", number)
                yield number, line

    def text(self) -> str:
        """The whole file as text. Raises BadInput where it is not UTF-8, or larger than a GiB."""
        with self.open() as stream:
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
            if len(data) > MAX_DOCUMENT_BYTES:
                raise self.fail("one JSON document of more than a GiB; split it")
            try:
                return data.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                raise self.fail(f"not UTF-8 at byte {error.start}; convert it to UTF-8") from None


def _remedy(line: bytes) -> str:
    """The advice for a line without an end."""
    if not line.strip(b"\0"):
        return " of zero bytes; the file was not written in full: fetch it again"
    return "; a trace has a request per line: write it so (jq -c '.[]' splits a JSON array)"


def open_source(path: str | Path, max_bytes: int = MAX_BYTES) -> Source:
    """Looks at a file's beginning. Raises BadInput for a missing, empty, zipped or unreadable file."""
    path = Path(path)
    with _open(path, max_bytes) as stream:
        head = stream.read(HEAD_BYTES)
    if not head.strip():
        raise BadInput(f"{path}: the file is empty; a trace needs at least one request")
    if not head.strip(b"\0"):
        raise BadInput(f"{path}: no text, only zero bytes; the file was not written in full: fetch it again")
    if head.startswith(_ZIP):
        raise BadInput(f"{path}: a zip archive; unzip it and give the trace inside")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadInput(f"{path}: UTF-16 text; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    return Source(path, max_bytes, head)


def _open(path: Path, max_bytes: int, progress: Callable[[int], object] | None = None) -> io.BufferedReader:
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise BadInput(f"{path}: a pipe or a device; a trace is read twice: save it to a file first")
        raw = path.open("rb")
        magic = raw.read(4)
        raw.seek(0)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; give a trace's path or the name of a bundled sample") from None
    except OSError as error:
        raise BadInput(f"{path}: can't be read ({error.strerror})") from None
    read: Callable[[int], bytes] = raw.read
    if magic.startswith(_GZIP):
        read = gzip.GzipFile(fileobj=raw).read
    elif magic == _ZSTD:
        read = _Zstd(raw).read
    return io.BufferedReader(_GuardedStream(path, raw, read, max_bytes, progress), MIB)


class _Zstd:
    """Reads concatenated zstd frames, and unlike the library's reader notices a cut-off one."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._frame = self._context.decompressobj()
        self._ready = memoryview(b"")

    def read(self, size: int) -> bytes:
        while not self._ready:
            fed = self._raw.read(_ZSTD_FEED_BYTES)
            if not fed:
                if not self._frame.eof:
                    raise EOFError
                return b""
            self._ready = memoryview(self._decompress(fed))
        out, self._ready = self._ready[:size], self._ready[size:]
        return bytes(out)

    def _decompress(self, fed: bytes) -> bytes:
        if self._frame.eof:
            self._frame = self._context.decompressobj()
        out = [self._frame.decompress(fed)]
        while self._frame.eof and self._frame.unused_data:
            rest = self._frame.unused_data
            self._frame = self._context.decompressobj()
            out.append(self._frame.decompress(rest))
        return b"".join(out)


class _GuardedStream(io.RawIOBase):
    """Counts what comes out and turns every decompression error into one line."""

    def __init__(
        self,
        path: Path,
        raw: io.BufferedReader,
        read: Callable[[int], bytes],
        max_bytes: int,
        progress: Callable[[int], object] | None,
    ) -> None:
        self._path, self._raw, self._read, self._max_bytes = path, raw, read, max_bytes
        self._progress = progress
        self._count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._read(len(buffer))
        except EOFError:
            raise BadInput(f"{self._path}: the compressed file is cut off; fetch it again") from None
        except (zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise BadInput(f"{self._path}: broken compression ({error}); fetch it again") from None
        except OSError as error:
            raise BadInput(f"{self._path}: can't be read ({error.strerror or error})") from None
        self._count += len(data)
        if self._count > self._max_bytes:
            raise BadInput(
                f"{self._path}: more than {self._max_bytes:,} bytes decompressed; "
                "cut it, or raise the limit (pagecast trace convert --max-bytes) if it is no mistake"
            )
        packed = self._raw.tell()
        if self._count > _FREE_BYTES and self._count > MOST_EXPANSION * packed:
            raise BadInput(
                f"{self._path}: unpacks to more than {MOST_EXPANSION} times its size, as no trace does; "
                "unpack it first if it is no mistake"
            )
        if self._progress is not None:
            self._progress(packed)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._raw.close()
        super().close()
