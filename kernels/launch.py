"""Cheap launches of Triton kernels: what depends on shapes is decided once, then remembered.

Triton's own launch binds, specialises and hashes every argument on every call. A `Launch` does it
once; later calls with 16-byte aligned pointers go straight to the compiled kernel.
"""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from pagecast.sim.core.errors import BadInput
from torch import Tensor

ALIGNMENT_BYTES = 16


@triton.jit
def after_predecessor(OVERLAP: tl.constexpr):
    """Waits until the kernel queued before has ended, and lets the next be brought up meanwhile.

    Everything but arguments and a model's parameters must be read after it (programmatic dependent launch,
    CUDA programming guide).
    """
    wait_for_predecessor(OVERLAP)
    let_next_start(OVERLAP)


@triton.jit
def wait_for_predecessor(OVERLAP: tl.constexpr):
    """The first half of `after_predecessor`."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The second half of `after_predecessor`.

    A short kernel calls it first of all, so that the next one fetches its weights meanwhile. The next may
    then begin before this one's predecessor has ended: before it waits, it may read weights alone.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels can be brought up on `device` before their predecessors end: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Launch:
    """One kernel with its compile-time constants and options.

    `kernel` is a `triton.jit` function whose parameters are tensors first, then numbers marked
    `do_not_specialize`, then `constants` in order (all `tl.constexpr`). With `device`, its last constant is
    OVERLAP, which it passes to `after_predecessor` before it reads anything but a model's parameters.
    """

    __slots__ = ("_compiled", "constants", "kernel", "options")

    def __init__(
        self, kernel: Any, constants: dict[str, Any], device: torch.device | None = None, **options: int
    ) -> None:
        self.kernel = kernel
        self.constants = dict(constants)
        self.options = options
        if device is not None:
            self.constants["OVERLAP"] = overlaps(device)
            self.options |= {"launch_pdl": True} if overlaps(device) else {}
        self._compiled: Any = None

    def __call__(self, programs: int, tensors: Sequence[Any], *numbers: float) -> None:
        """Queues `programs` of the kernel on the current stream.

        `tensors` (tensors, None or tensor descriptors) keep their kinds from call to call.
        """
        grid = (programs, 1, 1)
        aligned = not any(isinstance(t, Tensor) and t.data_ptr() % ALIGNMENT_BYTES for t in tensors)
        if aligned and self._compiled is not None:
            self._compiled[grid](*tensors, *numbers, *self.constants.values())
            return
        compiled = self.kernel[grid](*tensors, *numbers, **self.constants, **self.options)
        if aligned and hasattr(compiled, "run"):
            self._compiled = compiled


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n` (n >= 1)."""
    return 1 << (n - 1).bit_length()


def require_attention(name: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor) -> None:
    """Raises BadInput unless q, the caches and the block table can belong together."""
    require(
        k_cache.shape == v_cache.shape
        and k_cache.shape[3] == q.shape[2]
        and q.shape[1] % k_cache.shape[2] == 0,
        f"{name}: q {tuple(q.shape)} doesn't fit caches {tuple(k_cache.shape)} and {tuple(v_cache.shape)}; "
        "they must be [num_blocks, block_size, kv_heads, head_dim], and kv_heads must divide heads",
    )
    require(table.stride(1) == 1, f"{name}: the rows of block_table must be dense")


def require_sinks(name: str, q: Tensor, sinks: Tensor | None) -> None:
    """Raises BadInput unless there are no sinks, or a dense one for each query head."""
    if sinks is not None:
        require(
            sinks.shape == q.shape[1:2] and sinks.is_contiguous(),
            f"{name}: sinks {tuple(sinks.shape)} must be dense, one for each of {q.shape[1]} query heads",
        )


def require(holds: bool, what: str) -> None:
    """Raises BadInput(what) unless `holds`."""
    if not holds:
        raise BadInput(what)
