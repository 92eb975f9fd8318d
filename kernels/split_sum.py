"""Tiles of a product whose inputs are split among programs: the last of them adds up, always in order."""

# Device code takes tensors of the kernel language, which has no types.
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from pagecast.kernels.launch import next_power_of_2
from torch import Tensor


@triton.jit
def store_sum(
    out, acc, sums, arrivals, tile, split, output, token, tokens, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr
):
    """Writes a tile `acc` [outputs, tokens] to `out` [tokens, OUTPUTS] once all its splits are there.

    `sums` fp32 has a place for each split of each tile, `arrivals` int32 a count for each tile, zero between
    uses. `output` is the tile's first output, `token` [tokens] its tokens, of which there are `tokens`.
    """
    if SPLITS > 1:
        SIZE: tl.constexpr = acc.shape[0] * acc.shape[1]
        inside = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        part = sums + (tile * SPLITS).to(tl.int64) * SIZE + inside
        tl.store(part + split * SIZE, acc)
        tl.debug_barrier()  # all threads' stores come before the one thread's release
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            total = tl.zeros([acc.shape[0], acc.shape[1]], tl.float32)
            for nth in range(SPLITS):
                total += tl.load(part + nth * SIZE)
            _store(out, total, output, token, tokens, OUTPUTS)
    else:
        _store(out, acc, output, token, tokens, OUTPUTS)


@triton.jit
def _store(out, acc, output, token, tokens, OUTPUTS: tl.constexpr):
    lanes = output + tl.arange(0, acc.shape[0])
    at = out + token.to(tl.int64)[:, None] * OUTPUTS + lanes[None, :]
    tl.store(at, acc.T.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (lanes < OUTPUTS)[None, :])


# Of each device, ever larger ones; the last is used, and CUDA graphs may hold the others.
_workspaces: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}


def workspace(
    device: torch.device, tiles: int, splits: int, size: int
) -> tuple[Tensor | None, Tensor | None]:
    """`sums` and `arrivals` for so many tiles of `size` numbers; None where nothing is split.

    One serves all products of a device, which must run on one stream. A product that is captured in a CUDA
    graph must have run before, for memory made while capturing is not zero.
    """
    if splits == 1:
        return None, None
    length = tiles * splits * size
    spaces = _workspaces.setdefault(device, [])
    if not spaces or spaces[-1][0].numel() < length or spaces[-1][1].numel() < tiles:
        sums = torch.empty(next_power_of_2(length), dtype=torch.float32, device=device)
        arrivals = torch.zeros(next_power_of_2(max(tiles, 1024)), dtype=torch.int32, device=device)
        spaces.append((sums, arrivals))
    return spaces[-1]
