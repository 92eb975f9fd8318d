"""Transfer of a calibration to another set-up: accepted where it fits, scaled on request, or refused.

Efficiencies are assumed to carry over. Each term is scaled by the ratio of both set-ups in first principles:
weights and KV bytes over bandwidth, arithmetic over peak, launches by layers. Other CPU terms stay. The
interval widens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.calibrated import CalibratedCosts
from pagecast.sim.costs.calibration.file import Calibration, Host
from pagecast.sim.costs.calibration.shape import CPU, identity
from pagecast.sim.costs.calibration.target import Target
from pagecast.sim.costs.families.registry import family
from pagecast.sim.costs.families.term import SetUpRatios
from pagecast.sim.costs.roofline import Roofline
from pagecast.sim.costs.step_costs import Batch
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.models import model as find_model

# Of the level of step times for another model or GPU, and of prompts against decode: the error of the one
# transfer that was measured (see `trust.TRANSFER_TPOT_PERCENT`).
TRANSFER_SD = 0.13


def costs_for(calibration: Calibration, target: Target, *, transfer: bool = False) -> CalibratedCosts:
    """The calibration's costs for `target`, as they are or, where `transfer` allows it, scaled.

    Errors: BadInput naming what differs, unless `transfer`; for costs of a CPU; or where the calibrated model
    is unknown.
    """
    differs = difference(calibration, target)
    if differs is None:
        return CalibratedCosts(calibration, pipeline_depth=target.pipeline_depth)
    if calibration.made_for.get("gpu") == CPU:
        raise BadInput(
            f"calibration {calibration.name} was made on a CPU: no GPU to plan for is one; "
            "calibrate on the GPU, or give other costs"
        )
    if not transfer:
        raise BadInput(
            f"calibration {calibration.name} is {differs}: calibrate it, or carry these costs over "
            "(--transfer-costs; rougher)"
        )
    return CalibratedCosts(transferred(calibration, target), pipeline_depth=target.pipeline_depth)


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


def transferred(calibration: Calibration, target: Target) -> Calibration:
    """The calibration scaled to another model, GPU, sharding or KV dtype."""
    made_for, tp = calibration.made_for, target.tensor_parallel_size
    origin = Target(
        find_model(str(made_for["model"])),
        find_gpu(str(made_for["gpu"])),
        int(made_for.get("tensor_parallel_size", 1)),
        str(made_for.get("kv_cache_dtype") or "auto"),
    )
    scale = _Scale(calibration, origin, target)
    values = scale((*calibration.curve_ns, *calibration.terms_ns.values()))
    count = len(calibration.knots)
    kv_heads = target.model.local_kv_heads(tp)
    group = max(1, target.model.attention.heads // tp // kv_heads)
    terms = dict(zip(calibration.terms_ns, values[count:], strict=True))
    kind_sd = math.hypot(calibration.noise.kind_sd, TRANSFER_SD)
    noise = replace(calibration.noise, level_sd=TRANSFER_SD, kind_sd=kind_sd, gpu_sd=0.0)
    return replace(
        calibration,
        name=f"{calibration.name}, transferred",
        made_for={
            **made_for,
            "model": target.model.name,
            "gpu": target.gpu.name,
            "tensor_parallel_size": tp,
            "model_shape": identity(target.model),
            "kv_cache_dtype": target.kv_cache_dtype,
            "transferred_from": f"{made_for['model']} on {made_for['gpu']}",
            "sliding_windows": any(target.model.attention.windows),
        },
        shape=replace(calibration.shape, kv_heads=kv_heads, group=group, sms=target.gpu.sms),
        curve_ns=values[:count],
        terms_ns=terms,
        host=_host(calibration, origin, target, values[0], terms.get("prompt_step", 0.0)),
        noise=noise,
        replicates=tuple(scale(row) for row in calibration.replicates),
        hosts=(),
        options=calibration.options if origin.gpu == target.gpu else calibration.options.without_link,
    )


def _host(
    calibration: Calibration, origin: Target, target: Target, least_ns: float, prompt_step_ns: float
) -> Host:
    """The host's share: launches go by layers, and hide no more of a step than launching it adds.

    `least_ns`: the scaled matrix work of the fewest tokens; `prompt_step_ns`: what a step with prompts adds.
    """
    host = calibration.host
    added = (1 + host.busy) * prompt_step_ns + host.busy * least_ns
    layers = target.model.layers / origin.model.layers
    return replace(host, launch_ns=min(host.launch_ns * layers, added), single_ns=host.single_ns * layers)


class _Scale:
    """Scales a row of coefficients. The host's constant is part of every value of the curve, and stays."""

    def __init__(self, calibration: Calibration, origin: Target, target: Target) -> None:
        old, new = origin.roofline(), target.roofline()
        ratios = _ratios(origin, target)
        kernels = family(calibration.shape.family)
        self.factors = [_rows_ratio(old, new, tokens) for tokens in calibration.knots]
        self.floors = [calibration.host.step_ns] * len(self.factors)
        self.factors += [kernels.term(name).ratio(ratios) for name in calibration.terms_ns]
        self.floors += [0.0] * len(calibration.terms_ns)

    def __call__(self, values: tuple[float, ...]) -> tuple[float, ...]:
        rows = zip(values, self.factors, self.floors, strict=True)
        return tuple(min(v, floor) + max(v - floor, 0.0) * factor for v, factor, floor in rows)


def _rows_ratio(old: Roofline, new: Roofline, tokens: int) -> float:
    """Time of everything but attention for `tokens` rows, the new over the old."""
    if tokens <= 512:
        return new.decode_line(tokens).ns(0, 0) / old.decode_line(tokens).ns(0, 0)
    chunk = Batch(0, 0, 0, ((tokens, 0),))
    return new.device_ns(chunk) / old.device_ns(chunk)


def _ratios(origin: Target, target: Target) -> SetUpRatios:
    old, new = origin.roofline(), target.roofline()
    tile = [
        t.model.layers * t.model.attention.head_dim * t.gpu.sms / t.gpu.peak_flops("bf16")
        for t in (origin, target)
    ]
    return SetUpRatios(
        kv_read=target.kv_read_s / origin.kv_read_s,
        attention=tile[1] / tile[0],
        layers=target.model.layers / origin.model.layers,
        small_rows=_rows_ratio(old, new, 1),
        large_rows=_rows_ratio(old, new, 2048),
    )
