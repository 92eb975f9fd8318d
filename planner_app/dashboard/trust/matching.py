"""The calibration in force for a scenario, and its differences from the set-up it was fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import Calibration, read_shipped, shipped
from pagecast.sim.costs.calibration.shape import CPU, identity
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Trait:
    """One respect in which a set-up may differ from the calibrated one."""

    name: str
    calibrated: str
    scenario: str
    same: bool


def in_force(costs: StepCosts) -> Calibration | None:
    """The calibration behind costs; None: there is none."""
    return costs.calibration if isinstance(costs, CalibratedCosts) else None


def candidates() -> dict[str, Calibration]:
    """The shipped calibrations by name."""
    return {name: read_shipped(path) for name, path in shipped().items()}


def nearest(scenario: Scenario, calibrations: dict[str, Calibration]) -> str:
    """The one that differs least; "" where there is none."""
    return min(
        calibrations,
        key=lambda name: sum(not trait.same for trait in traits(calibrations[name], scenario)),
        default="",
    )


def traits(calibration: Calibration, scenario: Scenario) -> list[Trait]:
    """The set-up that was calibrated beside the scenario's."""
    made_for, model = calibration.made_for, scenario.facts()
    kv_dtype = str(made_for.get("kv_cache_dtype") or "auto")
    gpu = str(made_for.get("gpu"))

    def trait(name: str, key: str, own: Any, same: bool | None = None) -> Trait:
        was = made_for.get(key, "unknown")
        return Trait(name, str(was), str(own), was == own if same is None else same)

    return [
        trait("engine", "engine", scenario.profile.name),
        trait("model", "model", scenario.model, made_for.get("model_shape") == identity(model)),
        trait("GPU", "gpu", scenario.gpu, _same_gpu(gpu, scenario.gpu)),
        trait("GPUs a replica", "tensor_parallel_size", scenario.tensor_parallel_size),
        trait(
            "KV dtype",
            "kv_cache_dtype",
            scenario.kv_cache_dtype,
            model.kv_element_bytes(kv_dtype) == model.kv_element_bytes(scenario.kv_cache_dtype),
        ),
        trait("block size, tokens", "block_size", scenario.block_size),
    ]


def _same_gpu(calibrated: str, own: str) -> bool:
    if calibrated == CPU:
        return False
    try:
        return find_gpu(calibrated).name == find_gpu(own).name
    except BadInput:
        return False
