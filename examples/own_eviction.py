"""An eviction order of your own: a class in your own file, against vLLM's order on a trace.

    python examples/own_eviction.py [--blocks 2000] [--limit 300]

Blocks that the fewest requests have read go first; vLLM's go by when they were used last.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from pagecast.sim.core.engines.registry import ENGINES
from pagecast.sim.core.memory.eviction_orders import Content, EvictionOrder
from pagecast.sim.core.memory.ranked_eviction import RankedEviction
from pagecast.sim.replay.result import Kept
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.read import read


class FewestReaders(EvictionOrder):
    """The lowest level is evicted first; of equal levels the content that was used least recently."""

    def level(self, content: Content) -> float:
        """How often the content was reused."""
        return content.uses


OWN = replace(
    ENGINES["vllm"],
    name="fewest-readers",
    priced_as="vllm",  # its steps cost what vLLM's do
    eviction=lambda limits: RankedEviction(FewestReaders()),
)


def main() -> None:
    """Prints hits, evictions and TTFT with both orders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks: so few that some are evicted")
    parser.add_argument("--limit", type=int, default=300, help="requests of the sample `chat`")
    options = parser.parse_args()
    ENGINES[OWN.name] = OWN  # from here on a scenario may name it
    print("eviction            hits  evicted blocks  TTFT mean")
    for engine in ("vllm", OWN.name):
        scenario = Scenario(engine=engine, num_gpu_blocks=options.blocks)
        found = replay(read("chat", limit=options.limit), scenario, kept=Kept(steps=False)).summary
        hits, ttft_ms = found["token_hit_rate"], 1e3 * found["ttft_s"]["mean"]
        print(f"{engine:16}  {hits:6.1%}  {found['evicted_blocks']:14,}  {ttft_ms:6.1f} ms")


if __name__ == "__main__":
    main()
