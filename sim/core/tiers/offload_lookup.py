"""Lookup of the tokens that a waiting request can load from host memory beyond its prefix hit.

Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py (0.24).
"""

from __future__ import annotations

from pagecast.sim.core.request import Request
from pagecast.sim.core.tiers.content import ContentNames
from pagecast.sim.core.tiers.host_blocks import HostBlocks
from pagecast.sim.core.tiers.offload_rules import OffloadRules
from pagecast.sim.core.tiers.offloaded_group import OffloadedGroup
from pagecast.sim.core.tiers.progress import OffloadProgress


class OffloadLookup:
    """Names of requests' blocks, and what the host holds of them in a row.

    `windows`: the groups that have one, the longest first. `plain`: one group, which keeps all tokens and
    leaves out no block. `being_loaded`: names of blocks that requests are loading.
    """

    def __init__(self, groups: tuple[OffloadedGroup, ...], host: HostBlocks, rules: OffloadRules) -> None:
        self.names = ContentNames()
        self.being_loaded: set[int] = set()
        self.windows = [group for group in groups if group.window]
        self.windows.sort(key=lambda group: group.window, reverse=True)
        self.plain = len(groups) == 1 and not self.windows and not groups[0].drops_last
        # Hits end with a block of recurrent states, where there are any.
        self._state_size = max([group.size for group in groups if group.handed], default=0)
        self._groups = groups
        self._host = host
        self._rules = rules
        # Full attention is looked up first, then windows.
        self._order = [group for group in groups if not group.window] + self.windows

    def extend(self, progress: OffloadProgress, request: Request, known_tokens: int) -> bool:
        """Names the blocks of the first tokens. Returns whether nobody has asked for one of them before."""
        new = True
        keys = request.keys
        key_blocks = known_tokens // keys.block_size
        for group, names in zip(self._groups, progress.names, strict=True):
            blocks = key_blocks // group.units
            if len(names) < blocks:
                new &= self.names.extend(names, keys, group.number, group.units, blocks)
            else:
                new = False
        return new

    def touch(self, progress: OffloadProgress) -> None:
        """Makes the blocks that a request was told of, or stores, the last to give way."""
        if self._rules.by_request:
            return
        if self.plain:
            self._host.touch(progress.names[0])
            return
        for group, names, hits in zip(self._groups, progress.names, progress.hits, strict=True):
            self._host.touch(names[max(0, hits - group.window) :] if group.window else names)

    def tokens(self, progress: OffloadProgress, request: Request, local: int) -> int | None:
        """Tokens that can be loaded beyond the prefix hit of `local`; None: ask again later."""
        new = self.extend(progress, request, request.known_tokens)
        progress.local = local
        if self.plain:
            return self._plain_tokens(progress, request, new=new)
        tokens = self._group_tokens(progress, request)
        hit = local + (tokens or 0)
        progress.hits = [hit // group.size for group in self._groups]
        self.touch(progress)
        return tokens

    def _plain_tokens(self, progress: OffloadProgress, request: Request, *, new: bool) -> int | None:
        """Those of the blocks that follow the prefix hit and are stored, as far as they are in a row.

        `new`: nobody has asked for one of its blocks before.
        """
        names = progress.names[0]
        size = self._groups[0].size
        local = progress.local
        if request.known_tokens < local + size or len(names) * size < local + size:
            self._host.touch(names)
            return 0
        first = local // size
        if self._host.misses(names, first, new=new):
            return 0
        tokens = self._stored_tokens(names, first, local)
        self._host.touch(names)
        return tokens

    def _stored_tokens(self, names: list[int], first: int, local: int) -> int | None:
        """The tokens beyond `local` of the blocks from number `first` on that are stored in a row."""
        size = self._groups[0].size
        candidates = names[first:]
        count = self._host.leading(candidates)
        if count is None:
            return None
        tokens = size * (first + count) - local
        if not count or tokens < size:
            return 0
        if self.being_loaded and not self.being_loaded.isdisjoint(candidates[:count]):
            return None
        return tokens

    def _group_tokens(self, progress: OffloadProgress, request: Request) -> int | None:
        """The same for several groups: each may shorten what can be loaded, until all agree.

        The last token is left to compute where there are windows. A group whose hits leave out their last
        block (EAGLE) does so once, and again when another group has shortened the hit.
        """
        local = progress.local
        most = request.known_tokens - bool(self.windows)
        if self._state_size:
            most -= most % self._state_size
        hit = 0
        late = False
        dropped: set[int] = set()
        lookups = self._order
        while lookups:
            looked_at_window = False
            coming, lookups = lookups, []
            for group in coming:
                size = group.size
                names = progress.names[group.number]
                drops = group.drops_last and group.number not in dropped
                most = min(most, len(names) * size)
                if most - local < size:
                    return 0
                beyond = drops and (group.window or self._rules.drops_marked)
                reach = min(most + size, len(names) * size) if beyond else most
                first = local // size
                last = min(-(-reach // size), len(names))
                candidates = names[first:last]
                if group.window:
                    end = min(most, (last - drops) * size)
                    newest = group.load_window(end) if self._rules.ends_windows else group.window
                    count = self._host.last_run(candidates, group.window + drops, newest + drops)
                else:
                    count = self._host.leading(candidates)
                if count == 0:
                    return 0
                if count is None:
                    late = True
                else:
                    if drops:
                        count -= 1
                        dropped.add(group.number)
                    most = min(most, size * (first + count))
                shorter = most - local
                if shorter < size:
                    return 0
                if shorter < hit:
                    if not group.drops_last:
                        dropped.clear()
                    if late:
                        late = False
                        lookups = self._order
                    elif looked_at_window and not lookups:
                        lookups = self.windows
                looked_at_window |= bool(group.window)
                hit = shorter
        if late or self._waits_for_another(progress, local, hit):
            return None
        return hit

    def _waits_for_another(self, progress: OffloadProgress, local: int, hit: int) -> bool:
        """Whether another request is loading blocks of this hit."""
        if not self.being_loaded:
            return False
        for group, names in zip(self._groups, progress.names, strict=True):
            candidates = names[local // group.size : -(-(local + hit) // group.size)]
            if group.window:
                window = group.load_window(local + hit) if self._rules.ends_windows else group.window
                candidates = candidates[-window:]
            if not self.being_loaded.isdisjoint(candidates):
                return True
        return False
