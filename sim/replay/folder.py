"""The folder a replay leaves: complete, or as it was before."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.write import write_parquet

_SUMMARY = "summary.json"
_ONLY_OF_REPLICAS = ("events.parquet", "kv_events.jsonl")
_ONLY_OF_FLEETS = ("fleet.yaml", "replicas.parquet", "timeline.parquet")


@contextmanager
def replacing(out: str | Path | None) -> Iterator[Path | None]:
    """A fresh folder whose files move to `out` when the block ends well, and vanish when it does not.

    The files of an earlier replay in `out` go then, also those that the new one does not write; other files
    stay. Errors: BadInput where `out` can't be a folder or can't be written.
    """
    if out is None:
        yield None
        return
    if not str(out).strip():
        raise BadInput("--out is empty; name a folder")
    folder = Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    try:
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=_existing(folder)))
    except OSError as error:
        raise BadInput(f"--out {out}: can't be written ({error.strerror}); name another folder") from None
    try:
        yield place
        folder.mkdir(parents=True, exist_ok=True)
        _move_in(place, folder)
    except OSError as error:
        raise BadInput(f"--out {out}: can't be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above that exists. Files can be renamed from there into the folder.

    Not from beside it: where the folder is a mount of its own, its parent is on another disk.
    """
    while not folder.exists():
        folder = folder.parent
    return folder


def _move_in(place: Path, folder: Path) -> None:
    """Moves the files of `place` to `folder`, and those of an earlier replay away: all of them or none."""
    new = sorted(file.name for file in place.iterdir())
    old = [name for name in sorted({*new, *_left_before(folder)}) if _may_go(folder / name)]
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-before-", dir=place.parent))
    moves = [(folder / name, aside / name) for name in old]
    moves += [(place / name, folder / name) for name in new]
    try:
        for source, target in moves:
            os.replace(source, target)
    except BaseException:
        for source, target in reversed(moves):
            if not os.path.lexists(source):
                os.replace(target, source)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _left_before(folder: Path) -> tuple[str, ...]:
    """Names of files that not every replay writes, but the one that left the folder's summary may have."""
    try:
        summary = json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    if not isinstance(summary, dict) or "makespan_s" not in summary:
        return ()
    return _ONLY_OF_FLEETS if "fleet" in summary else _ONLY_OF_REPLICAS


def _may_go(path: Path) -> bool:
    """Whether something is there that a replay can have left: no folder."""
    return os.path.lexists(path) and not path.is_dir()


def save(
    folder: Path,
    trace: Trace,
    scenario: Scenario,
    costs: str,
    summary: dict[str, Any],
    table: pd.DataFrame,
) -> None:
    """Writes what is needed to read a replay and to repeat it: trace and scenario.

    `costs`: what stands for `auto` in the scenario, the name of the costs that were used.
    """
    fields: dict[str, Any] = {}
    if Path(scenario.model).expanduser().exists():
        fields["model"] = str(Path(scenario.model).expanduser().absolute())
    if Path(scenario.costs).is_file():
        fields["costs"] = str(Path(scenario.costs).absolute())
    elif scenario.costs == "auto":
        fields["costs"] = costs
    table.to_parquet(folder / "requests.parquet", index=False)
    write_parquet(trace, folder / "trace.parquet")
    scenario.changed(**fields).save(folder / "scenario.yaml")
    save_summary(folder, summary)


def save_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes the figures alone."""
    (folder / _SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
