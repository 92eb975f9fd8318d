"""Misfits of calibrations: how a calibration's set-up differs from the one that costs are asked for."""

from __future__ import annotations

from math import log

from pagecast.sim.costs.calibration.file import MEASURED, Calibration
from pagecast.sim.costs.calibration.shape import CPU, identity
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.models import model as find_model


def misfit(calibration: Calibration, target: Target) -> str | None:
    """Why a calibration is not for `target` and its engine; None where it is.

    One made from synchronous runs alone does not know what planning ahead hides.
    """
    engine = calibration.made_for.get("engine")
    if (differs := difference(calibration, target)) is not None:
        return differs
    if engine != target.engine:
        return f"for engine {engine}, not {target.engine}"
    if target.pipeline_depth and calibration.host.source == MEASURED:
        return "for synchronous scheduling alone (--no-async-scheduling)"
    return None


def difference(calibration: Calibration, target: Target) -> str | None:
    """The first difference between a calibration's set-up and `target`, as "for X, not Y"; None: it fits."""
    made_for = calibration.made_for
    if made_for.get("model_shape") != identity(target.model):
        return f"for {made_for.get('model')}, not {target.model.name}"
    if made_for.get("gpu") == CPU:
        return f"for a CPU, not {target.gpu.name}"
    if find_gpu(str(made_for.get("gpu"))).name != target.gpu.name:
        return f"for {made_for.get('gpu')}, not {target.gpu.name}"
    if made_for.get("tensor_parallel_size", 1) != target.tensor_parallel_size:
        size = made_for.get("tensor_parallel_size", 1)
        return f"for {size} {'GPU' if size == 1 else 'GPUs'} a replica, not {target.tensor_parallel_size}"
    if target.moe_data_parallel_size > 1:
        return f"for experts of one replica, not of {target.moe_data_parallel_size} data-parallel ranks"
    if target.gpu_link_gb_per_s is not None and target.tensor_parallel_size > 1:
        return "for the GPUs' own link, not one of gpu_link_gb_per_s"
    if target.host_time_factor is not None:
        return "for the host it was recorded on, not one of host_time_factor"
    element_bytes = target.model.kv_element_bytes(str(made_for.get("kv_cache_dtype") or "auto"))
    if element_bytes != target.model.kv_element_bytes(target.kv_cache_dtype):
        return f"for a KV cache in {made_for.get('kv_cache_dtype')}, not {target.kv_cache_dtype}"
    return None


def misfits(calibrations: list[Calibration], target: Target) -> tuple[tuple[str, str], ...]:
    """Names of calibrations and why each does not fit: two at most, of the same engine and model first."""

    def near(calibration: Calibration) -> tuple[object, ...]:
        made_for = calibration.made_for
        weight = find_model(str(made_for["model"])).weight_bytes() / target.model.weight_bytes()
        return (
            made_for.get("engine") != target.engine,
            made_for.get("model_shape") != identity(target.model),
            find_gpu(str(made_for["gpu"])).name != target.gpu.name,
            made_for.get("tensor_parallel_size", 1) != target.tensor_parallel_size,
            abs(log(weight)),
            -sum(int(run["steps"]) for run in calibration.provenance.get("runs", [])),
        )

    nearest = sorted(calibrations, key=near)[:2]
    return tuple((calibration.name, str(misfit(calibration, target))) for calibration in nearest)
