"""What a version of vLLM decides otherwise than the core: the first thing to run when a version appears.

    python drift.py 0.34.0 [--folder FOLDER] [--first 0] [--seeds 40] [--families plain,keys]

runs with pagecast's interpreter and installs nothing. PAGECAST_VLLM_PYTHON (or `--python`) is an interpreter
with vLLM's dependencies (see README.md); FOLDER, put on its PYTHONPATH, holds the version, as
`pip install --no-deps --target FOLDER vllm==0.34.0` makes it.

Every family is driven on the same seeds and replayed by the core. Printed are, for each family, how many
scenarios are equal in every field, and where the first of the others differs: seed, step and fields.
Scenarios in which vLLM fails or does not get on are counted apart.

`--record FOLDER` keeps what was decided, each family once it is complete. `--recorded` drives nothing: it
compares what is kept in `recorded/`, and with several versions prints a table.

Exit status: 0: all are equal; 1: some differ; 2: bad options; 3: the interpreter can't import this vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parent))

from decisions import Decisions, from_line, read, write
from families import EVENTS, FAMILIES, scenario
from pagecast.sim.core.engines.vllm.profile import VllmProfile, vllm
from pagecast.sim.core.engines.vllm.versions import VERSIONS
from recordings import compare, compare_events
from specifications import checksum

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
FIRST_VERSION = "0.24.0"  # its decisions are in files of their own, by seeds, but for the newer families
INTERPRETER = "PAGECAST_VLLM_PYTHON"
DIFFERENT, BAD_INPUT, NO_VLLM = 1, 2, 3


@dataclass
class Tally:
    """The scenarios of one family so far. `left_out`: the seeds in which vLLM fails, by how."""

    driven: int = 0
    equal: int = 0
    first: str = ""
    left_out: dict[str, list[int]] = field(default_factory=dict)

    def add(self, run: Decisions, features: tuple[str, ...], version: str) -> None:
        """Compares one scenario."""
        self.driven += 1
        difference = difference_of(run, features, version)
        if difference is None:
            self.equal += 1
        elif not self.first:
            self.first = f"seed {run.seed}: {difference}"

    def fail(self, seed: int, how: str) -> None:
        """Takes note of a scenario that vLLM does not serve to its end."""
        self.left_out.setdefault(how, []).append(seed)

    def line(self, name: str) -> str:
        """What is printed for the family."""
        notes = [f"{how}: seeds {', '.join(map(str, seeds))}" for how, seeds in self.left_out.items()]
        parts = [self.first, *(f"vLLM, {note}" for note in notes)]
        share = f"{self.equal}/{self.driven}"
        return f"{name:26}{share:>8}  {'; '.join(part for part in parts if part)}".rstrip()


def profile_of(version: str) -> VllmProfile:
    """The rules of a version as `0.33.0`; of one that is not known, those of the latest before it."""
    known = [name for name in VERSIONS if _numbers(name) <= _numbers(version)]
    return vllm(known[-1] if known else VERSIONS[0])


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def difference_of(run: Decisions, features: tuple[str, ...], version: str) -> str | None:
    """The first difference between a run and what the core decides; None where there is none."""
    spec = scenario(run.seed, features)
    if checksum(spec) != run.checksum:
        return "the specifications have changed: record the decisions again"
    replay = compare_events if EVENTS in features else compare
    with tempfile.TemporaryDirectory() as folder:
        try:
            difference = replay(spec, run, Path(folder) / "run", profile_of(version))
        except Exception as error:  # the core was told what can't be after its own decisions
            message = str(error).replace(f"{folder}/run: ", "")
            return f"the core can't follow: {type(error).__name__}: {message}"
    return str(difference) if difference else None


def driven(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple[str, Decisions | tuple[int, str]]]:
    """Families and runs, as the driver prints them; or a seed and how vLLM failed."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            yield parsed(text)
    if process.returncode:
        fail(NO_VLLM, f"the driver ended with exit status {process.returncode}; see its error above")


def parsed(text: str) -> tuple[str, Decisions | tuple[int, str]]:
    """One line of the driver."""
    name, _, line = text.partition(" ")
    if line.startswith("{"):
        return name, from_line(line)
    seed, how = json.loads(line)
    return name, (seed, how)


def kept(version: str, name: str, seeds: Container[int] = range(sys.maxsize)) -> Iterator[Decisions]:
    """The recorded runs of a version and family, of these seeds."""
    paths = [RECORDED / version / f"{name}.jsonl.xz"]
    if version == FIRST_VERSION:
        paths += sorted(RECORDED.glob(f"{'seeds' if name == 'plain' else name}-[0-9]*.jsonl.xz"))
    for path in paths:
        if path.exists():
            yield from (run for run in read(path) if run.seed in seeds)


def fail(status: int, message: str) -> NoReturn:
    """Ends the command."""
    print(f"drift.py: {message}", file=sys.stderr)
    raise SystemExit(status)


def check_version(python: str, environment: dict[str, str], version: str) -> None:
    """Ends the command unless the interpreter imports vLLM, and this version of it."""
    ask = "import importlib.metadata, vllm; print(importlib.metadata.version('vllm'))"
    try:
        done = subprocess.run(
            [python, "-W", "ignore", "-c", ask], env=environment, capture_output=True, text=True
        )
    except OSError as error:
        fail(BAD_INPUT, f"{python}: {error.strerror}")
    if done.returncode:
        fail(NO_VLLM, f"{python} can't import vllm: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    found = done.stdout.split()[-1]
    if found != version:
        fail(BAD_INPUT, f"{python} has vLLM {found}, not {version}; --folder names a folder that holds it")


def tallies_of(
    runs: Iterable[tuple[str, Decisions | tuple[int, str]]], version: str, record: Path | None = None
) -> dict[str, Tally]:
    """Compares runs family by family. Each is printed, and kept in the folder, once it is complete."""
    tallies: dict[str, Tally] = {}
    for name, family in groupby(runs, itemgetter(0)):
        tally = tallies[name] = Tally()
        keep: list[Decisions] = []
        for _, run in family:
            if isinstance(run, Decisions):
                tally.add(run, FAMILIES[name], version)
                keep.append(run)
            else:
                tally.fail(*run)
        print(tally.line(name), flush=True)
        if record is not None and keep:
            record.mkdir(parents=True, exist_ok=True)
            write(record / f"{name}.jsonl.xz", keep)
    return tallies


def drive(options: argparse.Namespace, names: list[str]) -> dict[str, Tally]:
    """Drives a version and compares what it decides."""
    python = options.python or os.environ.get(INTERPRETER)
    if not python:
        fail(BAD_INPUT, f"neither --python nor {INTERPRETER} names an interpreter")
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)  # pagecast's
    if options.folder:
        if not (options.folder / "vllm").is_dir():
            fail(BAD_INPUT, f"--folder {options.folder}: holds no vllm")
        environment["PYTHONPATH"] = str(options.folder)
    (version,) = options.versions
    check_version(python, environment, version)
    last = options.first + options.seeds - 1
    command = [python, "-W", "ignore", str(HERE / "drive_vllm.py"), str(options.first), str(last)]
    command += ["--families", ",".join(names), "--limit-s", str(options.limit_s)]
    return tallies_of(driven(command, environment), version, options.record)


def print_table(columns: dict[str, dict[str, Tally]], names: list[str]) -> None:
    """A table in Markdown: the share of equal scenarios by family and version."""
    print("\n| family | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for name in names:
        cells = [tallies.get(name) for tallies in columns.values()]
        print(f"| {name} | " + " | ".join(f"{c.equal}/{c.driven}" if c else "" for c in cells) + " |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What a version of vLLM decides otherwise than the core.")
    parser.add_argument(
        "versions", nargs="+", metavar="VERSION", help="as 0.34.0; several with --recorded only"
    )
    parser.add_argument("--python", help=f"interpreter with vLLM's dependencies; default: ${INTERPRETER}")
    parser.add_argument("--folder", type=Path, help="holds the version; put on the interpreter's PYTHONPATH")
    parser.add_argument("--seeds", type=int, default=40, help="seeds per family; default: 40")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default: 0")
    parser.add_argument("--families", help=f"with commas; default: {','.join(FAMILIES)}")
    parser.add_argument(
        "--limit-s", type=int, default=40, help="real time for vLLM per scenario; default: 40"
    )
    parser.add_argument("--record", type=Path, help="keep what was decided in this folder")
    parser.add_argument("--recorded", action="store_true", help="compare what is kept in recorded/")
    return parser.parse_args()


def main() -> None:
    options = parse()
    names = options.families.split(",") if options.families else list(FAMILIES)
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        fail(BAD_INPUT, f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    if options.seeds < 1 or options.limit_s < 1 or options.first < 0:
        fail(BAD_INPUT, "--seeds and --limit-s must be at least 1, --first at least 0")
    if len(options.versions) > 1 and not options.recorded:
        fail(BAD_INPUT, "several versions: with --recorded only")
    seeds = range(options.first, options.first + options.seeds)
    columns: dict[str, dict[str, Tally]] = {}
    for version in options.versions:
        print(f"vLLM {version}, seeds {seeds[0]} to {seeds[-1]}: equal, first difference", flush=True)
        if options.recorded:
            runs = ((name, run) for name in names for run in kept(version, name, seeds))
            columns[version] = tallies_of(runs, version)
            if not columns[version]:
                fail(BAD_INPUT, f"{RECORDED / version}: nothing is recorded")
        else:
            columns[version] = drive(options, names)
    if len(columns) > 1:
        print_table(columns, names)
    tallies = [tally for column in columns.values() for tally in column.values()]
    raise SystemExit(DIFFERENT if any(tally.equal < tally.driven for tally in tallies) else 0)


if __name__ == "__main__":
    main()
