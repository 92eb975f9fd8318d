"""Report of an unforeseen error: a file that a user can send, and the line that names it."""

from __future__ import annotations

import os
import platform
import tempfile
import traceback
from collections.abc import Iterable

from pagecast import __version__

_SECRETS = ("--api-key", "--hf-token")


def defect_line(error: BaseException, arguments: Iterable[str] = ()) -> str:
    """One line: which error it was, and where its report lies, which holds `arguments` without secrets."""
    kind = f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(": ")
    try:
        path = _write_report(error, arguments)
    except OSError as problem:
        return f"a defect of pagecast ({kind}); a report of it can't be written ({problem.strerror})"
    return (
        f"a defect of pagecast ({kind}); please report it with the file {path}, which says where it happened"
    )


def _write_report(error: BaseException, arguments: Iterable[str]) -> str:
    """Writes the report, which only its owner may read, and returns its path. Errors: OSError."""
    handle, path = tempfile.mkstemp(".txt", "pagecast-defect-")
    lines = [
        f"pagecast {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"arguments: {_without_secrets(arguments)}",
        "",
        *traceback.format_exception(error),
    ]
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as out:
        out.write("\n".join(lines))
    return path


def _without_secrets(arguments: Iterable[str]) -> list[str]:
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] in _SECRETS:
            argument = "..."
        name, mark, _ = argument.partition("=")
        shown.append(f"{name}=..." if mark and name in _SECRETS else argument)
    return shown
