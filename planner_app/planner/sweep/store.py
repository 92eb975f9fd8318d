"""A study on disk: a folder with `study.sqlite`, a row for each trial as it ends, and `trials.parquet`.

A trial is in the database once it is committed, whatever becomes of the process after that. One process at
a time writes; the lock goes with it, however it ends.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pagecast.planner_app.planner.slo import TermVerdict
from pagecast.planner_app.planner.sweep.space import Point
from pagecast.planner_app.planner.sweep.trial import TrialResult
from pagecast.sim.core.errors import BadInput
from pagecast.traces.write import replacing

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS study (field TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS trials (
    number INTEGER PRIMARY KEY, point TEXT NOT NULL, figures TEXT NOT NULL, terms TEXT NOT NULL,
    reason TEXT NOT NULL, costs TEXT NOT NULL DEFAULT '', rejections TEXT NOT NULL DEFAULT '{}');
"""
_COLUMNS = "number, point, figures, terms, reason, costs, rejections"
_ADDED = {"costs": "''", "rejections": "'{}'"}  # columns that studies of earlier versions lack: defaults


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial that has ended: its number, where in the space it lies, and what came of it."""

    number: int
    point: Point
    outcome: TrialResult


class Store:
    """The trials of one study, in a folder or, without one, in memory.

    `about` tells what the study is of; a folder that holds another study is refused. Errors: BadInput, with
    the first field that differs, for a folder that can't be used, and for one in use.
    """

    def __init__(self, folder: Path | None, about: Mapping[str, Any]) -> None:
        self.folder = folder
        self._lock = -1
        if folder is not None:
            self._lock = _claim(folder)
        try:
            self._database = sqlite3.connect(folder / "study.sqlite" if folder else ":memory:")
            self._database.executescript("PRAGMA journal_mode=WAL;" + _TABLES)
            self._check_version()
            _renew(self._database)
            self._check({name: json.dumps(value, sort_keys=True) for name, value in about.items()})
        except sqlite3.Error as error:
            self.close()
            raise BadInput(f"--out {folder}: study.sqlite: {error}; name another folder") from None
        except ValueError:
            self.close()
            raise BadInput(
                f"--out {folder}: study.sqlite: holds something other than a study; name another folder"
            ) from None
        except BadInput:
            self.close()
            raise

    def _check_version(self) -> None:
        """Marks a new study. Errors: BadInput for one of a later version."""
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise BadInput(
                f"--out {self.folder}: study.sqlite has version {version}, and this pagecast reads up to "
                f"{_VERSION}; name another folder, or use the pagecast that wrote it"
            )
        self._database.execute(f"PRAGMA user_version = {_VERSION}")

    def _check(self, about: dict[str, str]) -> None:
        on_disk = dict(self._database.execute("SELECT field, value FROM study"))
        if not on_disk:
            with self._database:
                self._database.executemany("INSERT INTO study VALUES (?, ?)", about.items())
            return
        for field in dict.fromkeys((*about, *on_disk)):
            if on_disk.get(field) != about.get(field):
                raise BadInput(
                    f"--out {self.folder}: holds a study of another {field} "
                    f"({_difference(on_disk.get(field), about.get(field))}); name another folder"
                )

    def trials(self) -> dict[int, Trial]:
        """The trials that have ended, by number."""
        with self._guarded():
            rows = self._database.execute(f"SELECT {_COLUMNS} FROM trials ORDER BY number")
            return {row[0]: _trial(*row) for row in rows}

    def add(self, trial: Trial) -> None:
        """Keeps a trial: from here on it survives."""
        outcome = trial.outcome
        row = (trial.number, *map(json.dumps, (trial.point, dict(outcome.figures), outcome.terms)))
        with self._guarded(), self._database:
            values = (*row, outcome.reason, outcome.costs, json.dumps(dict(outcome.rejections)))
            self._database.execute(f"INSERT INTO trials ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def save_table(self, table: pd.DataFrame) -> None:
        """Writes `trials.parquet`, at once or not at all."""
        if self.folder is None:
            return
        with replacing(self.folder / "trials.parquet") as part:
            table.to_parquet(part, index=False)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Errors: BadInput for a full disk, and for a database that is no study's."""
        try:
            yield
        except sqlite3.Error as error:
            problem = str(error)
        except (ValueError, TypeError, KeyError, AttributeError):
            problem = "holds something other than trials"
        else:
            return
        raise BadInput(f"--out {self.folder}: study.sqlite: {problem}; name another folder") from None

    def close(self) -> None:
        """Gives the folder free."""
        if hasattr(self, "_database"):
            self._database.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _trial(
    number: int, point: str, figures: str, terms: str, reason: str, costs: str, rejections: str
) -> Trial:
    verdicts = tuple(TermVerdict(*term) for term in json.loads(terms))
    outcome = TrialResult(json.loads(figures), verdicts, reason, costs, json.loads(rejections))
    return Trial(number, json.loads(point), outcome)


def _renew(database: sqlite3.Connection) -> None:
    """Adds the columns that a study of an earlier version lacks."""
    present = {row[1] for row in database.execute("PRAGMA table_info(trials)")}
    for name, default in _ADDED.items():
        if name not in present:
            with database:
                database.execute(f"ALTER TABLE trials ADD COLUMN {name} TEXT NOT NULL DEFAULT {default}")


def _claim(folder: Path) -> int:
    """Makes the folder and takes its lock, which ends with the process. Errors: BadInput."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise BadInput(f"--out {folder}: can't be written ({error.strerror}); name another folder") from None
    try:
        import fcntl
    except ImportError:  # no such locks on Windows: two sweeps of one study there are not kept apart
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise BadInput(f"--out {folder}: another pagecast is at work on this study; wait for it") from None
    return lock


_MOST = 3  # differing fields to name


def _difference(old_text: str | None, new_text: str | None) -> str:
    """A field's value in the folder and in the question; of tables only the entries that differ."""
    old, new = ({} if text is None else json.loads(text) for text in (old_text, new_text))
    if not isinstance(old, dict) or not isinstance(new, dict):
        return f"{_short(old)}, not {_short(new)}"
    names = [name for name in dict.fromkeys((*new, *old)) if old.get(name) != new.get(name)]
    parts = [f"{name} {_short(old.get(name))}, not {_short(new.get(name))}" for name in names[:_MOST]]
    return "; ".join(parts) + (f"; and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _short(value: Any) -> str:
    """A value of the study's description, as short as a line bears."""
    text = "none" if value in (None, "", {}) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
