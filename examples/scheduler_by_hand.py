"""The scheduler by hand: every step, with its blocks, hits and evictions.

    python examples/scheduler_by_hand.py

Nine blocks of four tokens, vLLM's rules. Text 1 is asked for twice, then texts 2 and 3, then text 1 again.
"""

from __future__ import annotations

from pagecast.sim.core.events import EventKind
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.request import Request
from pagecast.sim.core.scheduler import Scheduler

BLOCK = 4
SHOWN = (EventKind.ALLOCATED, EventKind.REUSED, EventKind.EVICTED, EventKind.FREED)


def main() -> None:
    """Serves the requests one after another, and prints a line for each step and each event in it."""
    scheduler = Scheduler(Limits(9, BLOCK, max_num_seqs=4, max_num_batched_tokens=12), log=True)
    for number, (name, text) in enumerate((("a", 1), ("b", 1), ("c", 2), ("d", 3), ("e", 1))):
        keys = BlockKeys.of_spans(BLOCK, [(text, 0, 17)], (1000 + number, 0))
        request = Request(name, keys, 17, 2)  # 17 prompt tokens, 2 generated ones
        scheduler.submit(request)
        while (plan := scheduler.plan(0)) is not None:
            chunks = sum(tokens for tokens, _ in plan.prefill)
            memory = scheduler.memory
            print(
                f"step {plan.step}: {name} computes {chunks + plan.decode_n} tokens; blocks used "
                f"{memory.used_blocks}, free {memory.free_blocks}; hits {request.cached_tokens} tokens"
            )
            scheduler.commit(plan)
            for event in scheduler.events or ():
                if event.kind in SHOWN:
                    print(f"    {event.kind.value} {list(event.blocks)}")
            (scheduler.events or []).clear()


if __name__ == "__main__":
    main()
