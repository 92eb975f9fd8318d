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
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace
from pagecast.traces.write import write_parquet


@contextmanager
def replacing(out: str | Path | None) -> Iterator[Path | None]:
    """A fresh folder whose files move to `out` when the block ends well, and vanish when it does not.

    Errors: BadInput where `out` can't be a folder or can't be written.
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
        parent = _existing(folder.parent)
        place = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=parent))
    except OSError as error:
        raise BadInput(f"--out {out}: can't be written ({error.strerror}); name another folder") from None
    try:
        yield place
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(place.iterdir()):
            os.replace(file, folder / file.name)
    except OSError as error:
        raise BadInput(f"--out {out}: can't be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _existing(folder: Path) -> Path:
    """The nearest folder above that exists: where temporary files may lie on the same disk."""
    while not folder.exists():
        folder = folder.parent
    return folder


def save(
    folder: Path,
    trace: Trace,
    scenario: Scenario,
    costs: StepCosts,
    summary: dict[str, Any],
    table: pd.DataFrame,
) -> None:
    """Writes what is needed to read a replay and to repeat it: trace and scenario, costs by their name."""
    fields: dict[str, Any] = {}
    if Path(scenario.model).expanduser().exists():
        fields["model"] = str(Path(scenario.model).expanduser().absolute())
    if Path(scenario.costs).is_file():
        fields["costs"] = str(Path(scenario.costs).absolute())
    elif scenario.costs == "auto":
        fields["costs"] = costs.name
    table.to_parquet(folder / "requests.parquet", index=False)
    write_parquet(trace, folder / "trace.parquet")
    scenario.model_copy(update=fields).save(folder / "scenario.yaml")
    save_summary(folder, summary)


def save_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes the figures alone."""
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
