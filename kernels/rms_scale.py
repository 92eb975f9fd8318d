"""Root mean square of a token's states, for kernels that divide by it."""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import Launch, after_predecessor, next_power_of_2
from torch import Tensor


@triton.jit
def rms_scale(states, row, eps, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr):
    """The reciprocal of the root mean square of a row of the dense `states` [tokens, WIDTH], in fp32."""
    lanes = tl.arange(0, WIDTH_POW2)
    wide = tl.load(states + row * WIDTH + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide) / WIDTH + eps)


@triton.jit(do_not_specialize=["eps"])
def _rms_scales(states, out, eps, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr, OVERLAP: tl.constexpr):
    after_predecessor(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, rms_scale(states, row, eps, WIDTH, WIDTH_POW2))


_launches: dict[Any, Launch] = {}


def rms_scales(states: Tensor, eps: float, room: int) -> Tensor:
    """`rms_scale` of each row of the dense `states` [tokens, width], in fp32 [room]; what lies past the last
    token is not set."""
    tokens, width = states.shape
    key = (states.device, states.dtype, width)
    launch = _launches.get(key)
    if launch is None:
        constants = {"WIDTH": width, "WIDTH_POW2": next_power_of_2(width)}
        launch = _launches[key] = Launch(_rms_scales, constants, states.device, num_warps=8)
    out = torch.empty(room, dtype=torch.float32, device=states.device)
    launch(tokens, (states, out), eps)
    return out
