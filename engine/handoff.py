"""Handoff of prompts between two engines: one computes a prompt, the other reads its blocks and generates.

    prefill engine   [ prompt ] held ......................... given back
    decode engine                reserved [ read ] cached, then submitted

The decode engine reads the other one's KV tensor over the link between their GPUs, in a stream beside the
model's, by the kernel that reads host memory (`host_tier.py`). Each engine has a process of its own, which
opens the other's memory by CUDA IPC; on the CPU it is shared memory. The core says what is held, reserved and
cached (`sim/core/handoff.py`).
"""

from __future__ import annotations

import inspect
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from pagecast.engine.engine import Engine
from pagecast.engine.host_tier import CudaLane, Lane, PlainLane
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.handoff import give_back, hold, land, reserve, stand_in, unread
from pagecast.sim.core.request import Request
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

_NO_PAIR = (-1, -1)  # copies nothing


@dataclass(frozen=True, slots=True)
class Parcel:
    """A computed prompt: the numbers of its blocks in the engine that holds them, in order."""

    id: str
    blocks: tuple[int, ...]


class Exporter:
    """Prompts of an engine that another one reads. Errors: BadInput for an engine that can't hand over."""

    def __init__(self, engine: Engine) -> None:
        _check(engine)
        self._engine = engine
        self._held: dict[str, Request] = {}

    def shared(self) -> Any:
        """The KV tensor, to be sent through a pipe to the other engine's process: see `Importer`."""
        kv = self._engine.loop.runner.kv
        return reduce_tensor(kv) if kv.is_cuda else kv.share_memory_()

    def hold(self, request: Request) -> Parcel:
        """Holds the blocks of a request that has just ended, until `give_back`."""
        holder = stand_in(request)
        self._held[request.id] = holder
        return Parcel(request.id, tuple(hold(self._engine.loop.scheduler, holder)))

    def give_back(self, id: str) -> None:
        """Frees blocks that have been read."""
        give_back(self._engine.loop.scheduler, self._held.pop(id))


@dataclass(slots=True)
class Arrival:
    """A prompt on its way; times in nanoseconds of the engine's clock, None for what has not happened.

    `reserved_ns` stays None where the prompt can never fit: it is to be submitted as it is, and rejected.
    """

    request: Request
    parcel: Parcel
    offered_ns: int
    reserved_ns: int | None = None
    landed_ns: int | None = None
    moved_blocks: int = 0
    moved_bytes: int = 0
    copied_ns: tuple[int, int] | None = field(default=None)  # when the copy began and ended


class Importer:
    """Reads prompts of another engine, one after another. `shared`: what its `Exporter.shared` gave.

    `advance` is called between steps. Errors: BadInput where the two engines' blocks differ.
    """

    def __init__(self, engine: Engine, shared: Any) -> None:
        _check(engine)
        kv = engine.loop.runner.kv
        source = _open(shared, kv.device)
        if kv.dtype != source.dtype or _block_shape(kv) != _block_shape(source):
            raise BadInput(
                f"the other engine's KV blocks are {_block_shape(source)} {source.dtype}, this one's "
                f"{_block_shape(kv)} {kv.dtype}; give both the same model, dtype and block_size"
            )
        self._engine = engine
        self._lane: Lane = CudaLane(source, kv) if kv.is_cuda else PlainLane(source, kv)
        self._block_bytes = kv.nbytes // kv.shape[1]
        self._waiting: deque[Arrival] = deque()
        self._copying: deque[Arrival] = deque()
        self._clock: object = None
        if kv.is_cuda:
            self._lane.start([_NO_PAIR])  # compiles the kernel; ended and forgotten by `_follow_clock`

    @property
    def busy(self) -> bool:
        """Whether prompts are under way."""
        return bool(self._waiting or self._copying)

    def offer(self, request: Request, parcel: Parcel) -> None:
        """Takes note of a prompt that the other engine holds. `request` is what is to be submitted for it."""
        if not self.busy:
            self._follow_clock()
        holder = stand_in(request)
        self._waiting.append(Arrival(holder, parcel, self._engine.loop.clock.now()))

    def advance(self) -> list[Arrival]:
        """Starts the copies that there is room for, in order. Returns the prompts that have arrived since."""
        arrived: list[Arrival] = []
        while self._copying and (times := self._lane.ended()) is not None:
            arrived.append(self._land(self._copying.popleft(), times))
        while self._waiting:
            arrival = self._waiting[0]
            if self._reserve(arrival):
                self._copying.append(arrival)
            elif self._engine.loop.scheduler.memory.used_blocks:
                break
            else:
                arrived.append(arrival)
            self._waiting.popleft()
        return arrived

    def _reserve(self, arrival: Arrival) -> bool:
        loop = self._engine.loop
        now = loop.clock.now()
        holder = arrival.request
        hit = reserve(loop.scheduler, holder)
        if hit is None:
            return False
        arrival.reserved_ns = now
        targets = unread(loop.scheduler, holder, hit)
        sources = arrival.parcel.blocks[len(arrival.parcel.blocks) - len(targets) :]
        pairs = list(zip(sources, targets, strict=True))
        arrival.moved_blocks = len(pairs)
        arrival.moved_bytes = len(pairs) * self._block_bytes
        self._lane.follow()
        self._lane.start(pairs)
        return True

    def _land(self, arrival: Arrival, times: tuple[int, int]) -> Arrival:
        loop = self._engine.loop
        arrival.copied_ns = times
        arrival.landed_ns = loop.clock.now()
        land(loop.scheduler, arrival.request)
        return arrival

    def _follow_clock(self) -> None:
        clock = self._engine.loop.clock
        if clock is not self._clock:
            self._lane.drain(clock.now)
            self._clock = clock


def _open(shared: Any, device: torch.device) -> Tensor:
    """Another process's KV tensor.

    Memory of another GPU is opened for the reader's own one, which CUDA IPC then lets reach it.
    """
    if isinstance(shared, Tensor):
        return shared
    rebuild, arguments = shared
    named = inspect.signature(rebuild).bind(*arguments)
    named.arguments["storage_device"] = device.index
    tensor: Tensor = rebuild(*named.args)
    return tensor


def _block_shape(kv: Tensor) -> tuple[int, ...]:
    layers, _, *inner = kv.shape
    return (layers, *inner)


def _check(engine: Engine) -> None:
    options = engine.options
    if options.tensor_parallel_size > 1:
        raise BadInput("a handoff of prompts needs tensor_parallel_size 1 in both engines")
    if not options.enable_prefix_caching:
        raise BadInput("a handoff of prompts needs prefix caching in both engines")
    if options.kv_offloading_size is not None:
        raise BadInput("a handoff of prompts needs engines without kv_offloading_size")
