"""Links between the GPUs of a group: torch.distributed, and own kernels over peer memory."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pagecast.engine.parallel.peer_memory import PeerMemory, ipc_memory, symmetric_memory
from pagecast.engine.shard import Collectives
from pagecast.kernels import all_reduce as kernels
from pagecast.sim.core.errors import CannotRunHere
from torch import Tensor

PEER_BYTES = 8 << 20
"""What goes through peer memory at once, at most: larger messages go in pieces."""
_MOST_PIECES = 16  # beyond, and with more than two GPUs beyond one piece, NCCL is as fast
_TWO_SHOT_BYTES = 256 << 10  # with more than two GPUs, from here on
_TIMEOUT_S = 600  # of joining and of every collective: others may still read weights
_symmetric = False  # whether torch's symmetric memory was asked for in this process
# The newer name of the two; the older one warns where both are there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def join(store: Any, rank: int, size: int, device: torch.device) -> Collectives:
    """Makes this process number `rank` of a group; all of them must call this. Errors: CannotRunHere."""
    if dist.is_initialized():
        raise CannotRunHere(
            "this process has a torch.distributed group already; an engine on several GPUs needs its own: "
            "close the other engine, or run this one in a process of its own"
        )
    # Multicast over NVLink can take a host's GPUs down where it is not set up; nothing here needs it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    timeout = timedelta(seconds=_TIMEOUT_S)
    if device.type != "cuda":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        return TorchLink(device)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
    )
    return _peer_link(store, device, rank, size)


def _loopback() -> str:
    return "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"


class TorchLink:
    """`Collectives` by torch.distributed: NCCL on GPUs, gloo on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "nccl" if device.type == "cuda" else "gloo"
        self._size = dist.get_world_size()

    def sum(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial)
        return partial

    def gather(self, own: Tensor) -> Tensor:
        out = torch.empty(self._size, *own.shape, dtype=own.dtype, device=own.device)
        _all_gather(out.view(self._size * len(own), *own.shape[1:]), own.contiguous())
        return out

    def least(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)

    def abort(self) -> None:
        if self.device.type == "cuda" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def close(self) -> None:
        with suppress(Exception):  # the others may be gone
            self.abort()
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()


class PeerLink(TorchLink):
    """`TorchLink` whose small messages go through the GPUs' memory, where the mailboxes are."""

    def __init__(self, device: torch.device, memory: PeerMemory, boxes: kernels.Mailboxes) -> None:
        super().__init__(device)
        self.kind = "peer"
        self.boxes = boxes
        self._memory = memory
        self._aside = torch.cuda.Stream(device)

    def sum(self, partial: Tensor) -> Tensor:
        most = PEER_BYTES * (_MOST_PIECES if self._size == 2 else 1)
        if partial.nbytes > most or not partial.is_contiguous():
            return super().sum(partial)
        two_shot = self._size > 2 and partial.nbytes >= _TWO_SHOT_BYTES
        for piece in partial.view(-1).split(PEER_BYTES // partial.element_size()):
            kernels.all_reduce(piece, self.boxes, two_shot=two_shot, out=piece)
        return partial

    def gather(self, own: Tensor) -> Tensor:
        if own.nbytes > PEER_BYTES or not own.is_contiguous() or own.element_size() not in (2, 4):
            return super().gather(own)
        return kernels.all_gather(own, self.boxes)

    def close(self) -> None:
        super().close()
        self._memory.free()

    def abort(self) -> None:
        with suppress(Exception), torch.cuda.stream(self._aside):
            self.boxes.stop.fill_(1)
        super().abort()


def _peer_link(store: Any, device: torch.device, rank: int, size: int) -> TorchLink:
    """Through peer memory where every GPU can write to every other, and through NCCL alone elsewhere."""
    link = TorchLink(device)
    memory = _peer_memory(link, store, device, rank, size)
    if memory is None:
        return link
    boxes = kernels.Mailboxes(memory.own, memory.addresses, rank, PEER_BYTES)
    boxes.clear()
    torch.cuda.synchronize(device)
    link.least(0)  # every mailbox is empty before anybody sends
    return PeerLink(device, memory, boxes)


def _peer_memory(
    link: TorchLink, store: Any, device: torch.device, rank: int, size: int
) -> PeerMemory | None:
    """The first kind of memory that every GPU has got."""
    global _symmetric
    most = kernels.mailbox_bytes(size, PEER_BYTES)
    memory = ipc_memory(most, device, store, rank, size)
    if link.least(int(memory is not None)):
        return memory
    if memory is not None:
        memory.free()
    if not link.least(int(not _symmetric)):
        return None
    _symmetric = True
    memory = symmetric_memory(most, device)
    return memory if link.least(int(memory is not None)) else None
