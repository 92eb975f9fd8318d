"""Sentences on what a forecast rests on: the engine's rules and defaults, and where step times come from."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pagecast.planner_app.wording.costs_name import costs_name
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from pagecast.planner_app.wording.note_sentences import ENGINES, sentence
from pagecast.sim.costs.calibration.draw import half_width_percent
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.note import Caution, Note
from pagecast.sim.scenario import Scenario

_ERRORS = ("calibrated_costs", "measured_costs", "roofline_costs", "corrected_costs")  # of step times


def assumed(scenario: Scenario, costs: StepCosts | None = None) -> list[str]:
    """Two sentences: origin and error of step times; rules and defaults of the engine. Errors: BadInput.

    `costs`: the step costs, where the scenario's own have been made already.
    """
    return [step_times(scenario, costs or scenario.step_costs()), rules(scenario)]


def beside_step_times(notes: Iterable[str]) -> list[str]:
    """Sentences for the notes but for those on the error of step times, which `step_times` says in short."""
    return [
        sentence(note)
        for note in notes
        if isinstance(note, Caution) or getattr(note, "code", "") not in _ERRORS
    ]


def rules(scenario: Scenario, *others: Scenario, varied: Collection[str] = ()) -> str:
    """`assumed: vLLM 0.33 defaults: max_num_seqs 1024, ...`; as `engine_defaults` of several servers."""
    listed = engine_defaults(scenario, *others, varied=varied)
    return f"assumed: {listed or f'{scenario.profile.label}, all options given'}"


def step_times(scenario: Scenario, costs: StepCosts) -> str:
    """Where step times come from, and how far they may be off."""
    within = f"step times ±{half_width_percent(costs):.0f}% (90%)"
    note = costs.expected_error()
    if not isinstance(note, Note):
        return f"{within}: {costs_name(costs.name)}"
    version = str(note.figures.get("engine_version") or "")
    ours = scenario.engine.partition("@")[2]
    other = f"; {ours} may differ more" if version and ours and not version.startswith(ours) else ""
    return f"{within}: {_origin(note, costs.name, other)}"


def _origin(note: Note, name: str, other: str) -> str:
    """Where step times come from; `other`: that the engine's rules are of another version."""
    figures = note.figures
    if note.code == "calibrated_costs":
        return f"fitted to runs of {_engine(figures)}{other} ({costs_name(name)})"
    if note.code == "measured_costs":
        return f"from operations that NVIDIA measured on {figures['gpu']} with {_engine(figures)}{other}"
    if note.code == "corrected_costs":
        return f"measured operations, corrected by your results ({costs_name(name)})"
    return "from published rates of the GPU, not measured"


def _engine(figures: Mapping[str, Any]) -> str:
    return f"{ENGINES.get(figures['engine'], figures['engine'])} {figures['engine_version']}"
