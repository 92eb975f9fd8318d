"""Host tier: KV blocks in pinned host memory, and the transfers to it and back that plans ask for.

Each direction has a stream of its own beside the model's, where its jobs run one after another:

    model   [ step k ][ step k+1 ][ step k+2 ] ...
    stores            [ of step k ][ of k+1 ] ...      after the step that computed them
    loads   [ of step k .................... ]         nobody reads them before they are reported

A load waits for the steps launched before it, for one of them may still write to the blocks it was given.
Which blocks move, when, and who waits for it is decided by the core (`sim/core/tiers`).

With several GPUs each has a tier for its share of the blocks. Workers are sent `HostOrders` with every step.
What the engine's own tier has reported as ended, a worker's step waits for on its GPU.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from pagecast.kernels import reference
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.core.plan import StepPlan, Transfer
from pagecast.sim.machine.gpus import GIB
from pagecast.sim.runs.transfers import LOAD, STORE, RecordedTransfer
from torch import Tensor

_NAP_S = 50e-6
_NS_PER_MS = 1_000_000
_REBASED_MS = 1000.0  # event times are float32: beyond that they are counted from a newer event

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class HostTransfer:
    """A job that has ended; times in nanoseconds of the loop's clock. `lost`: its blocks have no content."""

    job: int
    kind: str
    blocks: int
    bytes: int
    queued_ns: int
    start_ns: int
    end_ns: int
    lost: bool = False

    def recorded(self, told_ns: int) -> RecordedTransfer:
        """As a recorded run has it, once the scheduler was told of it."""
        times = (self.queued_ns, self.start_ns, self.end_ns)
        return RecordedTransfer(self.job, told_ns, self.kind, self.blocks, self.bytes, *times, self.lost)


class Copy(NamedTuple):
    """A `Transfer` without its request."""

    job: int
    blocks: tuple[int, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostOrders:
    """Transfers of a plan, as workers are sent them. `reported`: jobs that have ended, of which the scheduler
    knows; `fresh`: all earlier jobs are to be forgotten."""

    step: int
    flushed: tuple[int, ...]
    loads: tuple[Copy, ...]
    stores: tuple[Copy, ...]
    reported: tuple[int, ...]
    fresh: bool


@dataclass(slots=True)
class _Job:
    number: int
    step: int
    blocks: int
    queued_ns: int
    lost: bool = False


class Lane(Protocol):
    """One direction: runs jobs in order."""

    def start(self, pairs: list[tuple[int, int]]) -> None:
        """Queues a job that copies block pairs, (from, to)."""
        ...

    def ended(self) -> tuple[int, int] | None:
        """When the oldest job started and ended, and forgets it; None while it runs."""
        ...

    def hold(self, number: int) -> None:
        """Keeps the model's stream waiting until that job has ended, the oldest being 0."""
        ...

    def forget(self) -> None:
        """Forgets the oldest job, whether it has ended or not."""
        ...

    def follow(self) -> None:
        """Lets the next job wait for all that the model's stream has been given."""
        ...

    def drain(self, clock: Clock) -> None:
        """Waits for all jobs and forgets them. Times are `clock`'s from now on."""
        ...


class HostTier:
    """`places` blocks of the shape of those of `kv` [layers, blocks, ...] in host memory.

    A runner calls `begin` before a step's own work is queued and `finish` after it. `ended` gives the jobs to
    report to the scheduler.
    """

    def __init__(self, kv: Tensor, places: int) -> None:
        layers, _, *inner = kv.shape
        self.places = places
        self.block_bytes = kv.nbytes // kv.shape[1]
        self.memory = host_memory((places, layers, *inner), kv.dtype, kv.device)
        beside = self.memory.transpose(0, 1)  # blocks are counted by the same dimension as in `kv`
        self._clock: Clock = time.perf_counter_ns
        on_gpu = kv.device.type == "cuda"
        lane: Callable[[Tensor, Tensor], Lane] = CudaLane if on_gpu else PlainLane
        self._lanes = {LOAD: lane(beside, kv), STORE: lane(kv, beside)}
        self._jobs: dict[str, deque[_Job]] = {LOAD: deque(), STORE: deque()}
        self._lost: list[HostTransfer] = []
        self._reported: list[int] = []
        self._fresh = True
        if on_gpu:
            weakref.finalize(self, _unregister, self.memory)

    @property
    def busy(self) -> bool:
        """Whether transfers are under way, or have ended and were not reported."""
        return bool(self._jobs[LOAD] or self._jobs[STORE] or self._lost)

    def orders(self, plan: StepPlan) -> HostOrders:
        """What workers must be sent with this plan; asked once for each plan."""
        reported, self._reported = tuple(self._reported), []
        fresh, self._fresh = self._fresh, False
        loads, stores = (
            tuple(Copy(one.job, tuple(one.blocks), tuple(one.places)) for one in transfers)
            for transfers in (plan.loads, plan.stores)
        )
        return HostOrders(plan.step, tuple(plan.flushed), loads, stores, reported, fresh)

    def settle(self, orders: HostOrders) -> None:
        """Holds the step until the jobs have ended that were reported elsewhere, and forgets these."""
        if orders.fresh:
            self.restart(self._clock)
        for kind, jobs in self._jobs.items():
            count = sum(job.number in orders.reported for job in jobs)
            if count:
                self._lanes[kind].hold(count - 1)
            for _ in range(count):
                jobs.popleft()
                self._lanes[kind].forget()

    def begin(self, plan: StepPlan | HostOrders) -> None:
        """Holds the step until the stores are done whose blocks it gives away, and starts its loads."""
        numbers = {job.number: place for place, job in enumerate(self._jobs[STORE])}
        flushed = [numbers[job] for job in plan.flushed if job in numbers]
        if flushed:
            self._lanes[STORE].hold(max(flushed))
        if plan.loads:
            self._lanes[LOAD].follow()
            self._start(LOAD, plan.step, plan.loads)

    def finish(self, plan: StepPlan | HostOrders) -> None:
        """Starts the step's stores, which follow what it computes."""
        if plan.stores:
            self._lanes[STORE].follow()
            self._start(STORE, plan.step, plan.stores)

    def _start(self, kind: str, step: int, transfers: Iterable[Transfer | Copy]) -> None:
        for transfer in transfers:
            sides = (transfer.places, transfer.blocks) if kind == LOAD else (transfer.blocks, transfer.places)
            self._jobs[kind].append(_Job(transfer.job, step, len(transfer.blocks), self._clock()))
            self._lanes[kind].start(list(zip(*sides, strict=True)))

    def ended(self, before: int | None = None) -> list[HostTransfer]:
        """The jobs that have ended since this was asked last, in the order they ended.

        `before`: no stores of this step and later ones, whose outcome is not known yet.
        """
        ended, self._lost = self._lost, []
        for kind, jobs in self._jobs.items():
            while jobs and (kind == LOAD or before is None or jobs[0].step < before):
                times = self._lanes[kind].ended()
                if times is None:
                    break
                job = jobs.popleft()
                size = job.blocks * self.block_bytes
                ended.append(
                    HostTransfer(job.number, kind, job.blocks, size, job.queued_ns, *times, job.lost)
                )
        self._reported += [transfer.job for transfer in ended]
        return sorted(ended, key=lambda transfer: transfer.end_ns)

    def spoil(self, stores: Iterable[Transfer]) -> None:
        """Takes note that what these stores copy was not computed; they are reported as lost."""
        wrong = {transfer.job for transfer in stores}
        for job in self._jobs[STORE]:
            job.lost |= job.number in wrong

    def lose(self, stores: Iterable[Transfer]) -> None:
        """The same for stores that were never started."""
        now = self._clock()
        self._lost += [HostTransfer(one.job, STORE, 0, 0, now, now, now, lost=True) for one in stores]

    def warm_up(self) -> None:
        """Moves a block to and fro, so that what is compiled on first use is there; its content is lost."""
        for lane in self._lanes.values():
            lane.start([(0, 0)])
        self.restart(self._clock)

    def nap(self) -> None:
        """Waits a moment, for whoever has nothing to do but to wait for a transfer."""
        time.sleep(_NAP_S)

    def restart(self, clock: Clock) -> None:
        """Waits for all transfers and forgets them. Times are `clock`'s from now on."""
        for kind, lane in self._lanes.items():
            lane.drain(clock)
            self._jobs[kind].clear()
        self._lost = []
        self._reported = []
        self._fresh = True
        self._clock = clock


class PlainLane:
    """Copies at once, where there is no GPU."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source = source
        self._target = target
        self._times: deque[tuple[int, int]] = deque()
        self._clock: Clock = time.perf_counter_ns

    def start(self, pairs: list[tuple[int, int]]) -> None:
        start_ns = self._clock()
        reference.copy_blocks(self._source, self._target, pairs, block_dim=1)
        self._times.append((start_ns, self._clock()))

    def ended(self) -> tuple[int, int] | None:
        return self._times.popleft()

    def hold(self, number: int) -> None:
        pass  # all jobs have ended

    def forget(self) -> None:
        self._times.popleft()

    def follow(self) -> None:
        pass  # all steps have ended

    def drain(self, clock: Clock) -> None:
        self._times.clear()
        self._clock = clock


class CudaLane:
    """Copies with the GPU's own loads and stores, by few programs in a stream beside the model's."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        from pagecast.kernels.copy_blocks import copy_blocks

        self._copy = copy_blocks
        self._source = source
        self._target = target
        self._stream = torch.cuda.Stream()
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event, Tensor]] = deque()
        self._base = _event()
        self._base_ns = 0

    def start(self, pairs: list[tuple[int, int]]) -> None:
        host_pairs = torch.tensor(pairs, dtype=torch.int32).pin_memory()
        start, end = _event(), _event()
        with torch.cuda.stream(self._stream):
            device_pairs = host_pairs.to("cuda", non_blocking=True)
            start.record()
            self._copy(self._source, self._target, device_pairs, block_dim=1)
            end.record()
        self._events.append((start, end, host_pairs))

    def ended(self) -> tuple[int, int] | None:
        start, end, _ = self._events[0]
        if not end.query():
            return None
        self._events.popleft()
        took = int(start.elapsed_time(end) * _NS_PER_MS)
        since_ms = self._base.elapsed_time(end)
        end_ns = self._base_ns + int(since_ms * _NS_PER_MS)
        if since_ms > _REBASED_MS:
            self._base, self._base_ns = end, end_ns
        return end_ns - took, end_ns

    def hold(self, number: int) -> None:
        torch.cuda.current_stream().wait_event(self._events[number][1])

    def forget(self) -> None:
        self._events.popleft()

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def drain(self, clock: Clock) -> None:
        self._stream.synchronize()
        self._events.clear()
        self._base = _event()
        self._base.record(self._stream)
        self._base.synchronize()
        self._base_ns = clock()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def host_places(size_gib: float, block_bytes: int) -> int:
    """Blocks that fit in so many GiB. Errors: BadInput where not one does."""
    places = int(size_gib * GIB) // block_bytes
    if places < 1:
        raise BadInput(
            f"kv_offloading_size is {size_gib:g} GiB; one KV block takes {block_bytes / GIB:.6f}: give more"
        )
    return places


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory that the GPU can read and write directly. Errors: CannotRunHere where it can't be had.

    It is registered where it lies: PyTorch's own pinned memory takes the next power of two.
    """
    try:
        memory = torch.empty(shape, dtype=dtype, device="cpu")
    except RuntimeError:
        raise CannotRunHere(_too_little(shape, dtype)) from None
    if device.type != "cuda":
        return memory.zero_()
    failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(failed):
        raise CannotRunHere(_too_little(shape, dtype))
    return memory


def _too_little(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    size = torch.Size(shape).numel() * dtype.itemsize / GIB
    return f"{size:.2f} GiB of pinned host memory can't be had here; lower kv_offloading_size"
