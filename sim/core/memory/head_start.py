"""Head start: what a request has of the block after its cached prefix, or beyond it, without computing it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from pagecast.sim.core.memory.extent import Extent


class StartKind(Enum):
    """Where the tokens of a head start come from."""

    FORK = "fork"  # the block of the request's parent is copied
    COPY = "copy"  # a cached block that matches partly is copied
    TAKE = "take"  # a cached block that matches partly, and that nobody uses, becomes the request's own
    SWAP = "swap"  # what its preemption put aside in host memory is brought back


class HeadStart(NamedTuple):
    """`tokens` tokens beyond a prefix hit.

    `extent` is the cached one whose block is copied or taken over, and `source` that block.
    """

    tokens: int
    kind: StartKind
    extent: Extent | None = None
    source: int = -1


NO_START = HeadStart(0, StartKind.FORK)
