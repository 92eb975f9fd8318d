"""Whether a calibration may be used for a model and GPU, and what becomes of it for others when asked.

The efficiencies carry over: each term is scaled by what first principles say of both set-ups (weights and
KV bytes over bandwidth, arithmetic over peak, launches by layers); CPU terms stay. The interval widens.
"""

from __future__ import annotations

from dataclasses import replace

from pagecast.sim.calibration.calibrated import Calibrated
from pagecast.sim.calibration.file import Calibration
from pagecast.sim.calibration.noise import TRANSFER_SD
from pagecast.sim.calibration.shape import identity
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs import Batch
from pagecast.sim.gpus import Gpu
from pagecast.sim.gpus import gpu as find_gpu
from pagecast.sim.model_facts import ModelFacts
from pagecast.sim.models import model as find_model
from pagecast.sim.roofline import Roofline


def costs_for(
    calibration: Calibration,
    model: ModelFacts,
    gpu: Gpu,
    *,
    tensor_parallel_size: int = 1,
    pipeline_depth: int = 0,
    transfer: bool = False,
) -> Calibrated:
    """The calibration's costs for `model` on `gpu`, as they are or, where `transfer` allows it, scaled.

    Errors: BadInput naming what differs, unless `transfer`; or where the calibrated model is unknown.
    """
    differs = difference(calibration, model, gpu, tensor_parallel_size)
    if differs is None:
        return Calibrated(calibration, pipeline_depth=pipeline_depth)
    if not transfer:
        raise BadInput(
            f"calibration {calibration.name} is {differs}: calibrate it, or allow a transfer (rougher)"
        )
    scaled = transferred(calibration, model, gpu, tensor_parallel_size)
    return Calibrated(scaled, pipeline_depth=pipeline_depth)


def difference(
    calibration: Calibration, model: ModelFacts, gpu: Gpu, tensor_parallel_size: int = 1
) -> str | None:
    """What keeps a calibration from fitting, as "for X, not Y"; None where it fits."""
    made = calibration.made_for
    if made.get("model_shape") != identity(model):
        return f"for {made.get('model')}, not {model.name}"
    if find_gpu(str(made.get("gpu"))).name != gpu.name:
        return f"for {made.get('gpu')}, not {gpu.name}"
    if made.get("tensor_parallel_size", 1) != tensor_parallel_size:
        return f"for {made.get('tensor_parallel_size')} GPUs a replica, not {tensor_parallel_size}"
    return None


def transferred(
    calibration: Calibration, model: ModelFacts, gpu: Gpu, tensor_parallel_size: int = 1
) -> Calibration:
    """The calibration scaled to another model, GPU or sharding."""
    made, tp = calibration.made_for, tensor_parallel_size
    old_model, old_gpu = find_model(str(made["model"])), find_gpu(str(made["gpu"]))
    old = Roofline(old_model, old_gpu, tensor_parallel_size=int(made.get("tensor_parallel_size", 1)))
    scale = _Scale(calibration, old, Roofline(model, gpu, tensor_parallel_size=tp))
    values = scale((*calibration.curve_ns, *calibration.terms_ns.values()))
    count = len(calibration.knots)
    kv_heads = model.local_kv_heads(tp)
    return replace(
        calibration,
        name=f"{calibration.name}, transferred",
        made_for={
            **made, "model": model.name, "gpu": gpu.name, "model_shape": identity(model),
            "tensor_parallel_size": tp, "transferred_from": f"{made['model']} on {made['gpu']}",
        },
        shape=replace(
            calibration.shape,
            kv_heads=kv_heads,
            group=max(1, model.attention.heads // tp // kv_heads),
            sms=gpu.sms,
        ),
        curve_ns=values[:count],
        terms_ns=dict(zip(calibration.terms_ns, values[count:], strict=True)),
        noise=replace(calibration.noise, level_sd=TRANSFER_SD),
        replicates=tuple(scale(row) for row in calibration.replicates),
    )  # fmt: skip


class _Scale:
    """Scales a row of coefficients. The host's constant is the floor of the curve: it does not shrink."""

    def __init__(self, calibration: Calibration, old: Roofline, new: Roofline) -> None:
        terms = _term_ratios(old, new)
        self.factors = [_rows_ratio(old, new, tokens) for tokens in calibration.knots]
        self.floors = [calibration.host.step_ns] * len(self.factors)
        self.factors += [terms.get(name, 1.0) for name in calibration.terms_ns]
        self.floors += [0.0] * len(calibration.terms_ns)

    def __call__(self, values: tuple[float, ...]) -> tuple[float, ...]:
        rows = zip(values, self.factors, self.floors, strict=True)
        return tuple(min(v, floor) + max(v - floor, 0.0) * factor for v, factor, floor in rows)


def _rows_ratio(old: Roofline, new: Roofline, tokens: int) -> float:
    """Time of everything but attention for `tokens` rows, the new over the old."""
    if tokens <= 512:
        return new.decode_line(tokens).base / old.decode_line(tokens).base
    chunk = Batch(0, 0, 0, ((tokens, 0),))
    return new.device_ns(chunk) / old.device_ns(chunk)


def _term_ratios(old: Roofline, new: Roofline) -> dict[str, float]:
    """How each term that is not the host's scales; terms that are missing stay."""
    a, b = old.model, new.model
    read = [
        r.model.kv_bytes_per_token("auto", r.tensor_parallel_size) / r.gpu.hbm_bytes_per_s for r in (old, new)
    ]
    tile = [
        r.model.layers * r.model.attention.head_dim * r.gpu.sms / r.gpu.peak_flops("bf16") for r in (old, new)
    ]
    kv, flops, layers = read[1] / read[0], tile[1] / tile[0], b.layers / a.layers
    return {
        "kv_token": kv, "longest_context": kv, "prompt_tile": flops, "longest_prompt_tile": flops,
        "prompt_step": layers, "ungraphed_step": layers,
    }  # fmt: skip
