"""The console script: runs a command, and ends it in one line and an exit code whatever happens.

Exit codes: 0 good, 1 a check failed, 2 bad input or output, 3 this machine cannot, 4 a defect of pagecast,
with a file for a report, 130 interrupted. Nothing heavy is imported before `run` can catch an interrupt.

The first interrupt says so at once and ends the command, which drops what has not ended and leaves files
whole. Those that follow while it does so change nothing (`timeout -s INT` sends two); one that comes later
than `_PATIENCE_S` ends the process there and then, whatever keeps it. An interrupt may be lost, as by a
library that catches everything while it is imported: where the command has not ended `_LOST_S` after the
first one, it comes again, and after as long once more the process ends.
"""

from __future__ import annotations

import _thread
import errno
import io
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from pagecast.planner_app.garbage import collect_seldom
from pagecast.planner_app.stderr import complain, drop_stdout

CANNOT_RUN_HERE = 3
DEFECT = 4
INTERRUPTED = 130
_PATIENCE_S = 3.0
_LOST_S = 5.0


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; an error a user can mend is one line on stderr."""
    interrupts = _Interrupts()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell leaves it to background jobs
        signal.signal(signal.SIGINT, interrupts)
    collect_seldom()
    try:
        code = run(arguments)
    except KeyboardInterrupt:  # amid another error's last words
        code = INTERRUPTED
    interrupts.ending = True
    if code == INTERRUPTED:
        _end_soon()
    sys.exit(code)


def _end_soon() -> None:
    """Python's own end would let the next interrupt kill it, or wait for ever for what it can't end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last = threading.Timer(_PATIENCE_S, os._exit, (INTERRUPTED,))
    last.daemon = True
    last.start()


class _Interrupts:
    """Handler of SIGINT, by their number. `ending`: the command is over, only Python's exit is left."""

    def __init__(self) -> None:
        self.ending = False
        self._first_s: float | None = None
        self._stream_closed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._first_s is None and not self.ending:
            self._first_s = time.monotonic()
            with suppress(OSError):  # not by Python's stderr: the signal may have come amid a write to it
                os.write(2, b"pagecast: stopping...\n")
            _thread.start_new_thread(self._watch, ())  # takes no lock, as `threading` would in a handler
            raise KeyboardInterrupt
        if self._stream_closed and not self.ending:
            self._stream_closed = False
            raise KeyboardInterrupt
        if self._first_s is None or time.monotonic() - self._first_s > _PATIENCE_S:
            os._exit(INTERRUPTED)

    def _watch(self) -> None:
        """Sends the interrupt again where it was lost, and then ends the process."""
        time.sleep(_LOST_S)
        if self.ending:
            return
        self._stream_closed = True
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(_LOST_S)
        if not self.ending:
            os._exit(INTERRUPTED)


def run(arguments: list[str] | None = None) -> int:
    """The same, returning the exit code."""
    if sys.stdout is None:  # Python's word for a closed one
        complain("stdout is closed; send it to a file or to /dev/null")
        return 2
    # The arrays here are small: more threads only spin, and take the cores that other processes need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may hold what the terminal can't show
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from pagecast.planner_app.commands.registry import execute

        code = execute(arguments)
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            drop_stdout()
        return code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except MemoryError:
        return _out_of_memory()
    except ImportError as error:
        return _out_of_memory() if _for_want_of_memory(error) else _defect(error, arguments)
    except BrokenPipeError:  # the reader of our output has gone (`| head`): nothing left to say
        drop_stdout()
        return 0
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return _out_of_memory()
        drop_stdout()
        where = f"{error.filename}: " if error.filename else "can't write the output: "
        complain(f"{where}{error.strerror or error}")
        return 2
    except Exception as error:
        return _defect(error, arguments)


def _defect(error: Exception, arguments: list[str]) -> int:
    """What no command foresaw: a line, and a file with all that a report of it needs."""
    from pagecast.planner_app.defects import defect_line

    drop_stdout()
    complain(defect_line(error, arguments))
    return DEFECT


def _out_of_memory() -> int:
    drop_stdout()
    complain(
        "out of memory; serve fewer requests (--limit, --requests), use fewer --workers, or a machine that "
        "has more"
    )
    return CANNOT_RUN_HERE


def _for_want_of_memory(error: BaseException | None) -> bool:
    """Whether a library could not be loaded because there was no room for it."""
    while error is not None:
        words = str(error)
        if isinstance(error, MemoryError) or "failed to map segment" in words or "allocate memory" in words:
            return True
        error = error.__cause__ or error.__context__
    return False
