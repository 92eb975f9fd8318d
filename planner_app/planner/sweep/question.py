"""The question of a sweep: trace, space around a scenario, SLO, prices and objectives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from pagecast import __version__
from pagecast.planner_app.planner.directions import more_is_better
from pagecast.planner_app.planner.fleet import knobs as fleet_knobs
from pagecast.planner_app.planner.gate.baseline import digest
from pagecast.planner_app.planner.prices import priced
from pagecast.planner_app.planner.slo import Slo
from pagecast.planner_app.planner.sweep import search
from pagecast.planner_app.planner.sweep.loads import Loads
from pagecast.planner_app.planner.sweep.options import SweepOptions
from pagecast.planner_app.planner.sweep.space import Point, Space, parse_space
from pagecast.planner_app.planner.sweep.store import Trial
from pagecast.planner_app.planner.sweep.trial import (
    FIGURES,
    GPUS_HELD,
    Figure,
    Trials,
    deployment,
)
from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.replay.room import LIMITS
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

COSTS = ("usd_per_hour", "usd_per_million_output_tokens", "gpus", "gpu_hours")


@dataclass(frozen=True)
class SweepQuestion:
    """A sweep before it runs. Equal questions have equal answers, on any number of workers.

    With `fleet`, or a knob of fleets in the space, every trial is of a fleet. With `loads` the space may have
    fields of a load, and each trial is served its own requests: `trace` are those of the first. `prices` are
    those of `ask` by the GPUs' full names, `objectives` those of `ask` or the usual ones. Errors: BadInput
    for what can't be asked.
    """

    trace: Trace
    scenario: Scenario
    ask: SweepOptions
    fleet: FleetSettings | None = None
    loads: Loads | None = None
    space: Space = field(init=False)
    prices: Mapping[str, float] = field(init=False)
    objectives: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        space = parse_space(self.ask.settings, self.scenario, fleet=True, load=self.loads is not None)
        object.__setattr__(self, "space", space)
        if self.fleet is None and any(knob.name in fleet_knobs.KNOBS for knob in space.knobs):
            object.__setattr__(self, "fleet", FleetSettings.make({}))
        object.__setattr__(self, "prices", priced(self.ask.price, self.gpus))
        object.__setattr__(self, "objectives", self.ask.objective or self._usual())
        self._check_objectives()
        if self.ask.search is None:
            self.space.grid()

    @property
    def slo(self) -> str:
        """The SLO as it is written in full; empty for none."""
        return self.level.text

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPU types of the space, and of the fleet's groups and rollout."""
        gpus = next((knob.values for knob in self.space.knobs if knob.name == "gpu"), (self.scenario.gpu,))
        fleet = self.fleet
        if fleet is not None and all("gpu" in group.scenario for group in fleet.groups):
            gpus = ()
        own = [fields["gpu"] for fields in (fleet.overrides if fleet is not None else ()) if "gpu" in fields]
        return tuple(dict.fromkeys(find_gpu(str(name)).name for name in (*gpus, *own)))

    def _usual(self) -> tuple[str, ...]:
        """Cost, where it differs, and the two latencies; throughput instead of a cost that is the same."""
        cost = "usd_per_hour" if self.prices else "gpus"
        own_names = {"gpu", "tensor_parallel_size", *fleet_knobs.COUNTS}
        varies = own_names & {knob.name for knob in self.space.knobs}
        first = cost if varies else "output_tokens_per_s"
        return (first, "ttft_p99_s", "tpot_p95_s")

    def _check_objectives(self) -> None:
        names = (*FIGURES, *COSTS)
        for name in self.objectives:
            if name not in names:
                raise BadInput(f"--objective {name}: is not known; objectives are {', '.join(names)}")
            if name == "gpu_hours" and self.fleet is None:
                raise BadInput("--objective gpu_hours: is of fleets; --objective gpus counts a replica's")
            if name.startswith("usd") and not self.prices:
                raise BadInput(f"--objective {name}: needs prices, such as --price H200=3.5")

    @property
    def count(self) -> int:
        """How many trials there will be, at most."""
        return self.ask.search if self.ask.search is not None else self.space.size or 0

    @property
    def level(self) -> Slo:
        """The SLO; without one, a level of no terms."""
        return Slo.optional(self.ask.slo)

    def work(self) -> Trials:
        """The work of the sweep's trials, as executors send it to worker processes."""
        shares = self.fleet is None and any(knob.name in LIMITS for knob in self.space.knobs)
        return Trials(self.trace, self.scenario, self.level, self.fleet, self.loads, shares)

    def figures(self, trial: Trial) -> dict[str, Figure]:
        """A trial's figures with what its GPUs cost."""
        figures = dict(trial.outcome.figures)
        gpu, count = deployment(self.scenario, trial.point)
        gpu_counts: dict[str, float] = {gpu: count}
        if self.fleet is None:
            figures["gpus"] = count
        else:
            gpu_counts = {
                name.removeprefix(GPUS_HELD): figures[name] or 0.0 for name in figures if GPUS_HELD in name
            }
        if self.prices and gpu_counts:
            hourly = sum(self.prices[name] * each for name, each in gpu_counts.items())
            figures["usd_per_hour"] = hourly
            tokens, makespan_s = figures.get("output_tokens"), figures.get("makespan_s")
            spent = hourly / 3600 * makespan_s if makespan_s else None
            figures["usd_per_million_output_tokens"] = spent / tokens * 1e6 if spent and tokens else None
        return figures

    def next_points(self, trials: Sequence[Trial], number: int) -> list[Point]:
        """The points of generation `number` of a search, from the trials of those before it."""
        observations = [
            search.Observation(trial.point, self._values(trial), tuple(_beyond(trial)))
            for trial in sorted(trials, key=lambda trial: trial.number)
        ]
        more = [bool(more_is_better(name)) for name in self.objectives]
        return search.generation(
            self.space, more, observations, seed=self.scenario.seed, number=number, size=self.ask.generation
        )

    def _values(self, trial: Trial) -> tuple[float | None, ...]:
        figures = self.figures(trial)
        return tuple(None if trial.outcome.reason else figures.get(name) for name in self.objectives)

    def about(self) -> dict[str, Any]:
        """The fields that identify a study: a folder's trials are reused only where all of them are equal.

        The number of trials of a search is not among them, so a longer search goes on in the same folder.
        """
        about: dict[str, Any] = {
            "trace": f"{self.trace.name}, {len(self.trace):,} requests, {digest(self.trace)[:12]}",
            "space": str(self.space),
            "scenario": self.scenario.resolved(),
            "SLO": self.slo,
            "kind": "grid" if self.ask.search is None else f"search in generations of {self.ask.generation}",
            "pagecast version": __version__,
            "files": self._files(),
        }
        if self.loads is not None:
            about["load"] = self.loads.load.given()
        if self.fleet is not None:
            about["fleet"] = self.fleet.model_dump(mode="json")
        if self.ask.search is not None:
            about |= {
                "objectives": list(self.objectives),
                "prices": dict(self.prices),
                "Optuna version": search.version(),
            }
        return about

    def _files(self) -> dict[str, str]:
        """Digests of the files that scenarios of the space and of the fleet read: calibrations, models."""
        fields: list[Mapping[str, Any]] = [self.scenario.flat()]
        fields += [{knob.name: value} for knob in self.space.knobs for value in knob.values]
        fields += self.fleet.overrides if self.fleet is not None else []
        digests = {}
        for path in (Path(name).expanduser() for each in fields for name in _paths(each)):
            file = path / "config.json" if path.is_dir() else path
            if file.is_file():
                digests[str(path)] = xxhash.xxh3_128_hexdigest(file.read_bytes())
        return digests


def _beyond(trial: Trial) -> list[float]:
    """How far a trial is beyond what it must keep, one number a condition; at most 0 is kept."""
    outcome = trial.outcome
    if outcome.reason:
        return [search.CANNOT_RUN]
    refused = float(outcome.figures.get("rejected") or 0)
    margin = outcome.margin
    return [refused] if margin is None else [refused, min(-margin, search.CANNOT_RUN)]


def _paths(fields: Mapping[str, Any]) -> Iterator[str]:
    """What may be a file or folder among a scenario's fields: its model, its draft model, its calibration."""
    yield from (str(fields[name]) for name in ("model", "costs") if name in fields)
    written = fields.get("speculative_config") or {}
    try:
        parsed = json.loads(written) if isinstance(written, str) else written
    except ValueError:  # METHOD:DRAFTS:ACCEPTANCE, which names no model
        return
    if isinstance(parsed, dict) and parsed.get("model") is not None:
        yield str(parsed["model"])
