"""Offloaded groups: the KV groups of a replica in blocks as large as the host tier keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.group_spec import Found, GroupSpec, KvKind
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.tiers.offload_rules import OffloadRules


class OffloadedGroup(NamedTuple):
    """One KV group. `size`: tokens of an offloaded block; `units`: key blocks of it.

    `window`: how many offloaded blocks a window needs, `window_tokens` its tokens; 0 where every token is
    kept. `segment`: where larger blocks of other groups leave only some places at which a hit can end, their
    distance in offloaded blocks; else 0. `short_segments`: the last one may be shorter. `aligned`: tokens
    between places at which a hit may end, where only those near boundaries count; else 0. `drops_last`: hits
    leave out their last block (EAGLE). `handed`: its blocks are recurrent states, which the memory hands over
    when it publishes them (`KvMemory.take_states`); of these a load needs the last.
    """

    number: int
    block_size: int
    size: int
    units: int
    window: int
    window_tokens: int
    segment: int
    short_segments: bool
    aligned: int
    drops_last: bool
    handed: bool

    def is_reachable(self, place: int, last: int) -> bool:
        """Whether a load can ever ask for the offloaded block at a place. Blocks are stored up to `last`."""
        if not self.segment:
            return True
        within = place % self.segment
        if not self.short_segments:
            return within >= self.segment - self.window
        length = min(self.segment, last - place + within)
        return within >= length - self.window - self.drops_last

    def near(self, boundaries: Sequence[int]) -> list[range]:
        """The places of device blocks that a hit needs which ends at one of the boundaries, in tokens."""
        assert self.aligned
        needed = -(-(self.window_tokens - 1) // self.block_size) + self.drops_last
        ends = [tokens // self.aligned * self.aligned // self.block_size for tokens in boundaries]
        return [range(end + self.drops_last - needed, end + self.drops_last) for end in ends]

    def load_window(self, tokens: int) -> int:
        """How many offloaded blocks a load needs that ends after `tokens`, maybe within one."""
        if self.handed:
            return self.window
        return max(self.window, -(-(self.window_tokens - 1 + -tokens % self.size) // self.size))


def offloaded_groups(
    limits: Limits, factor: int, rules: OffloadRules, *, drops_last: bool, near_boundaries: bool
) -> tuple[OffloadedGroup, ...]:
    """The groups of a replica. `near_boundaries`: as `WindowRules.keeps_boundaries`.
    Errors: BadInput where a host tier does not serve one of them (as vLLM's)."""
    specs = limits.groups or (GroupSpec(KvKind.FULL, limits.block_size),)
    for spec in specs:
        if not spec.rules.offloaded:
            raise BadInput(f"KV offloading does not serve layers of {spec.kind_name}")
    if factor > 1 and len({spec.block_size for spec in specs}) > 1:
        raise BadInput("offloaded blocks of several device blocks need one block size in all KV groups")
    full = {spec.block_size * factor for spec in specs if spec.rules.keeps_all}
    aligned = full.pop() if len(full) == 1 else 0
    if near_boundaries and not aligned and not any(spec.rules.keeps_all for spec in specs):
        aligned = max(spec.block_size for spec in specs) * factor
    groups = []
    for number, spec in enumerate(specs):
        size = spec.block_size * factor
        handed = spec.rules.scattered
        window = -(-spec.window // size) if spec.rules.found is Found.FROM_END else 0
        if handed:
            window = 1
        segment = aligned // size if window and aligned > size else 0
        if window >= segment:
            segment = 0
        near = aligned if near_boundaries and window and aligned % spec.block_size == 0 else 0
        groups.append(
            OffloadedGroup(
                number,
                spec.block_size,
                size,
                size // limits.block_size,
                window,
                spec.window if window else 0,
                0 if near_boundaries else segment,
                rules.stores_short_segments,
                near,
                drops_last and not rules.drops_marked,
                handed,
            )
        )
    return tuple(groups)
