"""FlashAttention 2, which vLLM runs on Ampere, Ada and desktop Blackwell: no calibration, but its tiles."""

from __future__ import annotations

from pagecast.sim.costs.families.attention_tiles import Tiles
from pagecast.sim.costs.families.fa3 import EXPOSED

# Over paged KV, a tile of 64 rows for each head. What a tile hides was not measured: as FlashAttention 3.
TILES = Tiles(rows=64, packed=False, exposed=EXPOSED)
