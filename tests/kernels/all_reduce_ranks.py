"""Processes that reduce and gather through shared memory with interpreted kernels, as GPUs do through theirs.

python all_reduce_ranks.py RANKS   ends with status 0 if every result of every rank is right. A script of its
own, because it forks before torch starts threads.
"""

import mmap
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from pagecast.kernels import all_reduce as kernels

MOST_BYTES = 16384
# Elements, dtype, two-shot: sizes that are no whole number of 16 bytes too, in an order that mixes channels.
MESSAGES = [
    (5000, torch.bfloat16, False),
    (701, torch.float32, False),
    (5000, torch.bfloat16, True),
    (4096, torch.float16, False),
    (33, torch.float32, True),
    (64, torch.bfloat16, True),
    (8192, torch.bfloat16, False),
] * 2


def parts(turn: int, size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Every rank's message: [ranks, n], with the negative zeros that are never sent."""
    generator = torch.Generator().manual_seed(turn)
    x = torch.randn(size, n, generator=generator).to(dtype)
    x[:, ::7] = -0.0
    return x


def in_order(x: torch.Tensor) -> torch.Tensor:
    """The sum in float32, rank after rank."""
    total = torch.zeros(x.shape[1])
    for part in x:
        total += part.float()
    return total.to(x.dtype)


def run(rank: int, size: int, memory: mmap.mmap) -> bool:
    """One rank's part; whether all it got was right."""
    torch.set_num_threads(1)
    each = kernels.mailbox_bytes(size, MOST_BYTES)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    addresses = [whole.data_ptr() + r * each for r in range(size)]
    boxes = kernels.Mailboxes(whole[rank * each : (rank + 1) * each], addresses, rank, MOST_BYTES)
    good = True
    for turn, (n, dtype, two_shot) in enumerate(MESSAGES):
        x = parts(turn, size, n, dtype)
        total = kernels.all_reduce(x[rank].clone(), boxes, two_shot=two_shot)
        # The interpreter rounds to 16 bits its own way.
        exact, tolerance = in_order(x), 0.0 if dtype == torch.float32 else 1e-2
        good &= torch.allclose(total.float(), exact.float(), rtol=tolerance, atol=tolerance)
        bits = total.view(torch.int32) if n % 2 == 0 or dtype == torch.float32 else total.view(torch.int16)
        good &= bool((kernels.all_gather(bits, boxes) == bits).all())
        ids = torch.arange(300, dtype=torch.int32).reshape(2, 150) * (rank + 1)
        every = kernels.all_gather(ids, boxes)
        good &= all(torch.equal(every[r], ids // (rank + 1) * (r + 1)) for r in range(size))
    return good


def main() -> None:
    """Forks the ranks over empty mailboxes."""
    size = int(sys.argv[1])
    memory = mmap.mmap(-1, size * kernels.mailbox_bytes(size, MOST_BYTES))
    memory[:] = b"\x00\x80" * (len(memory) // 2)
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os._exit(0 if run(rank, size, memory) else 1)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    main()
