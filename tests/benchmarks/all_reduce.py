"""All-reduce between the GPUs of this host: `python tests/benchmarks/all_reduce.py [GPUS] [--json FILE]`.

Ours beside NCCL, torch's symmetric memory and, where vLLM is installed, its custom all-reduce; bf16, one
process per GPU. Each figure is the time of one of 40
all-reduces in a CUDA graph, the median of 9 replays, on the slowest GPU. Results are compared first.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

SIZES = [1 << n for n in range(13, 24)]
INNER, OUTER = 40, 9


class Way(NamedTuple):
    """A way to add up a tensor of every GPU, and what must be held while it is captured in a graph."""

    call: Callable[[Tensor], Tensor]
    capture: Callable[[], AbstractContextManager[None]] = nullcontext


def seconds(call: Callable[[], object], capture: Callable[[], AbstractContextManager[None]]) -> float:
    """Seconds of one call within a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(INNER):
            call()
    times = []
    for _ in range(OUTER + 2):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / INNER)
    taken = torch.tensor([statistics.median(times[2:])], device="cuda")
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def ways(device: torch.device, size: int, store: Any) -> dict[str, Way]:
    """Each way, by its name."""
    import torch.distributed._symmetric_memory as symmetric
    from pagecast.engine.parallel.peer_memory import ipc_memory
    from pagecast.kernels import all_reduce as kernels

    rank, most = dist.get_rank(), max(SIZES)
    group = dist.group.WORLD
    assert group is not None

    def ours(program_bytes: int, two_shot: bool) -> Callable[[Tensor], Tensor]:
        kernels.PROGRAM_BYTES = program_bytes
        own_store = dist.PrefixStore(f"{program_bytes}-{two_shot}", store)
        memory = ipc_memory(kernels.mailbox_bytes(size, most), device, own_store, rank, size)
        if memory is None:
            raise SystemExit("the GPUs can't reach each other's memory")
        boxes = kernels.Mailboxes(memory.own, memory.addresses, rank, most)
        boxes.clear()
        torch.cuda.synchronize()
        dist.barrier()

        def call(x: Tensor) -> Tensor:
            kernels.PROGRAM_BYTES = program_bytes
            return kernels.all_reduce(x, boxes, two_shot=two_shot)

        return call

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    shared = symmetric.empty(most // 2, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, group)

    def torch_one_shot(x: Tensor) -> Tensor:
        own = shared[: x.numel()]
        own.copy_(x)
        return torch.ops.symm_mem.one_shot_all_reduce(own, "sum", group.group_name)

    def torch_two_shot(x: Tensor) -> Tensor:
        own = shared[: x.numel()]
        own.copy_(x)
        return torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", group.group_name)

    made = {"nccl": Way(nccl), "torch one-shot": Way(torch_one_shot), "torch two-shot": Way(torch_two_shot)}
    for program_bytes in (1024, 2048, 4096, 8192):
        made[f"one-shot {program_bytes}"] = Way(ours(program_bytes, False))
    made["two-shot 2048"] = Way(ours(2048, True))
    return made | vllm_way(device)


def vllm_way(device: torch.device) -> dict[str, Way]:
    """vLLM's custom all-reduce; nothing where vLLM is not installed or declines."""
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError:
        return {}
    custom = CustomAllreduce(dist.new_group(backend="gloo"), device, max_size=2 * max(SIZES))
    if custom.disabled:
        print("vLLM's custom all-reduce declines these GPUs", flush=True)
        return {}
    return {"vLLM custom": Way(custom.custom_all_reduce, custom.capture)}


def run(rank: int, size: int, path: str, out: str | None) -> None:
    """One GPU's part."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.FileStore(path, size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    table: dict[str, dict[int, float]] = {}
    for name, (call, capture) in ways(device, size, store).items():
        row: dict[int, float] = {}
        table[name] = row
        for n in SIZES:
            generator = torch.Generator(device).manual_seed(n + rank)
            x = torch.randn(n // 2, device=device, generator=generator).bfloat16()
            exact = x.float()
            dist.all_reduce(exact)
            error = float((call(x.clone()).float() - exact).norm() / exact.norm())
            if not error < 1e-2:
                raise SystemExit(f"{name} of {n} bytes is wrong: relative error {error}")
            scratch = torch.zeros_like(x)
            row[n] = seconds(lambda call=call, scratch=scratch: call(scratch), capture)
        if rank == 0:
            print(f"{name:16}", *(f"{took * 1e6:8.1f}" for took in row.values()), flush=True)
            if out is not None:
                with open(out, "w", encoding="utf-8") as file:
                    json.dump(table, file, indent=1)
    torch.cuda.synchronize()
    os._exit(0)


def main() -> None:
    """Prints microseconds, a way per row."""
    arguments: list[Any] = sys.argv[1:]
    out = None
    if "--json" in arguments:
        at = arguments.index("--json")
        out = arguments[at + 1]
        del arguments[at : at + 2]
    size = int(arguments[0]) if arguments else torch.cuda.device_count()
    print(f"{'microseconds':16}", *(f"{n >> 10:6}Ki" for n in SIZES), flush=True)
    path = os.path.join(tempfile.mkdtemp(), "store")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.multiprocessing.spawn(run, args=(size, path, out), nprocs=size)


if __name__ == "__main__":
    main()
