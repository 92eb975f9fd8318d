"""Memory of one GPU that others of the group can write: by CUDA IPC, or by torch's symmetric memory.

torch counts exchanges of symmetric memory per process and keeps the store of the first group of a name, so
that it can be had only once in a process. CUDA IPC has no such limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """`own` is this GPU's; `addresses`: where each GPU's lies in this one's address space.

    `free` gives it back, once nobody uses it any more.
    """

    own: Tensor
    addresses: list[int]
    free: Callable[[], object]


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("internal", ctypes.c_char * _HANDLE_BYTES),)


class _Block:
    """Device memory of cudaMalloc that torch can take as a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def ipc_memory(size: int, device: torch.device, store: Any, rank: int, ranks: int) -> PeerMemory | None:
    """`size` bytes on each GPU by CUDA IPC; None where this GPU or one of the others can't be reached."""
    name = "pagecast-ipc"
    own = ctypes.c_void_p()
    opened: list[ctypes.c_void_p] = []

    def free() -> None:
        for address in opened:
            runtime.cudaIpcCloseMemHandle(address)
        if own:
            runtime.cudaFree(own)

    handle = _Handle()
    try:
        runtime = _runtime()
        torch.cuda.synchronize(device)
        _call(runtime, "cudaMalloc", ctypes.byref(own), ctypes.c_size_t(size))
        _call(runtime, "cudaIpcGetMemHandle", ctypes.byref(handle), own)
        mine = bytes(handle)
    except (OSError, RuntimeError):
        mine = b""
    # What failed is told too, so that nobody waits for it.
    store.set(f"{name}/{rank}", mine or b"-")
    handles = [store.get(f"{name}/{peer}") for peer in range(ranks)]
    if any(len(each) != _HANDLE_BYTES for each in handles):
        free()
        return None
    addresses = []
    try:
        for peer, each in enumerate(handles):
            address = own
            if peer != rank:
                address = ctypes.c_void_p()
                flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
                peer_handle = _Handle.from_buffer_copy(each)
                _call(runtime, "cudaIpcOpenMemHandle", ctypes.byref(address), peer_handle, flags)
                opened.append(address)
            addresses.append(int(address.value or 0))
    except RuntimeError:
        free()
        return None
    tensor = torch.as_tensor(_Block(addresses[rank], size), device=device)
    return PeerMemory(tensor, addresses, free)


def symmetric_memory(size: int, device: torch.device) -> PeerMemory | None:
    """The same by torch, on all GPUs of the group together; None where torch can't."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    try:
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError:
        return None
    return PeerMemory(memory, [int(address) for address in handle.buffer_ptrs], lambda: None)


def _call(runtime: Any, name: str, *arguments: Any) -> None:
    code = getattr(runtime, name)(*arguments)
    if code:
        runtime.cudaGetLastError()  # or the next call of torch would raise this error
        raise RuntimeError(f"{name} failed with CUDA error {code}")


@cache
def _runtime() -> Any:
    """The CUDA runtime that torch has loaded. Errors: OSError where there is none."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if "libcudart" in path:
            return ctypes.CDLL(path)
    raise OSError("no CUDA runtime is loaded")
