"""Partial reuse: a cached block that shares its first tokens with the next block of a prompt."""

from __future__ import annotations

from itertools import islice

from pagecast.sim.core.identity.keys import BlockKeys, common_tokens
from pagecast.sim.core.memory.group import Group, GroupHit
from pagecast.sim.core.memory.head_start import NO_START, HeadStart, StartKind
from pagecast.sim.core.memory.run import Run
from pagecast.sim.core.request import Request

_MOST_CANDIDATES = 256


class PartialReuse:
    """Looks for the cached block that follows a prefix hit and shares most tokens with the request.

    `copies`: where the block is in use, or others follow it, it is copied; else only blocks that nobody uses
    are taken over. Candidates are the blocks that follow the hit in the tree, at most 256, the newest first.
    Prompts that share no full block share nothing. Source: partial reuse of TensorRT-LLM.
    """

    def __init__(self, block_size: int, *, copies: bool) -> None:
        self._block_size = block_size
        self._copies = copies
        self.tokens = 0
        self.copied_blocks = 0
        self.taken_blocks = 0
        self._group: Group | None = None

    def serve(self, group: Group) -> None:
        """Takes blocks over in this group from now on."""
        self._group = group

    def take_over(self, request: Request, run: Run) -> None:
        """Gives a request the last block of a cached run that nobody holds."""
        assert self._group is not None
        self._group.take_over(request, run)

    def find(self, keys: BlockKeys, hit: GroupHit, known_tokens: int) -> HeadStart:
        """The best block to go on in; at least one known token is left to compute."""
        if not hit.pieces:
            return NO_START
        start = hit.blocks * self._block_size
        most = min(known_tokens - 1 - start, self._block_size - 1)
        best = NO_START
        last, _, _ = hit.pieces[-1]
        if most <= 0:
            return best
        for run in _followers(last, hit.blocks):
            other = run.keys
            if other is None or other.scope != keys.scope:
                continue
            tokens = common_tokens(keys, other, start, most)
            if tokens <= best.tokens:
                continue
            kind = StartKind.TAKE if _is_idle_leaf(run, hit.blocks) else StartKind.COPY
            if kind is StartKind.TAKE or self._copies:
                best = HeadStart(tokens, kind, run, run.blocks[hit.blocks - run.start])
        return best

    def figures(self) -> dict[str, int]:
        """Tokens reused this way, and the blocks that they came from."""
        return {
            "tokens": self.tokens,
            "copied_blocks": self.copied_blocks,
            "taken_blocks": self.taken_blocks,
        }


def _followers(last: Run, block: int) -> list[Run]:
    """Published runs that have block number `block` of the sequences that go on after `last`."""
    runs = [last] if block < last.start + last.published else []
    children = (run for run in reversed(last.children or ()) if run.start == block and run.published)
    return [*runs, *islice(children, _MOST_CANDIDATES)]


def _is_idle_leaf(run: Run, block: int) -> bool:
    """Whether nobody holds the block, and none follows it."""
    return block == run.end - 1 and run.owned() <= block - run.start and not run.children
