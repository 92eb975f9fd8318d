"""Root mean square of a token's states, for kernels that divide by it."""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def rms_scale(states, row, eps, WIDTH: tl.constexpr, WIDTH_POW2: tl.constexpr):
    """The reciprocal of the root mean square of a row of the dense `states` [tokens, WIDTH], in fp32."""
    lanes = tl.arange(0, WIDTH_POW2)
    wide = tl.load(states + row * WIDTH + lanes, mask=lanes < WIDTH, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide) / WIDTH + eps)
