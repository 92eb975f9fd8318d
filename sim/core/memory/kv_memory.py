"""KV memory: groups of layers, each of which keeps its tokens, over one pool of extents.

A plain model has one group that keeps every token. Prefixes are found by `PrefixSearch`. Before a running
request takes blocks, those that left its windows are given back (`leave`). What becomes of a block is told in
`extent_pool.py`.

While requests only decode, blocks are taken for all of them at once and dealt out to the groups when somebody
looks; what they fill is published when somebody may look for it (see `OutputWriters`).

Source: vllm/v1/core/kv_cache_coordinator.py and kv_cache_manager.py (0.24).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, groupby, islice

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.group_spec import GroupSpec, KvKind, aligned_tokens
from pagecast.sim.core.identity.keys import segment_of
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.blocks import columns_of, have_numbers
from pagecast.sim.core.memory.checkpoint_group import CheckpointGroup
from pagecast.sim.core.memory.dividing import Division
from pagecast.sim.core.memory.eviction import Eviction
from pagecast.sim.core.memory.extent import Extent, Origin
from pagecast.sim.core.memory.extent_pool import ExtentPool
from pagecast.sim.core.memory.head_start import NO_START, HeadStart, StartKind
from pagecast.sim.core.memory.hit import Hit, TableHit
from pagecast.sim.core.memory.layer_group import HandedState, LayerGroup, Part, mark_of
from pagecast.sim.core.memory.memory import Growth, Memory
from pagecast.sim.core.memory.output_writers import OutputWriters
from pagecast.sim.core.memory.partial_reuse import PartialReuse
from pagecast.sim.core.memory.prefix_search import NO_HIT, PrefixSearch
from pagecast.sim.core.memory.ranked_extent_pool import RankedExtentPool
from pagecast.sim.core.memory.table import Leaver, Table, Tables
from pagecast.sim.core.memory.tenant_ledger import TenantLedger
from pagecast.sim.core.memory.watcher import Watcher
from pagecast.sim.core.memory.window_rules import DENSE, WindowRules
from pagecast.sim.core.memory.windows import Windows
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.retention import Keep

Progress = Callable[[Request], int]
"""How many of a generating request's tokens may be published now."""

_LONG = 1 << 62


class KvMemory(Memory):
    """The blocks of one replica, in groups of layers as `limits.groups` says.

    `block_size` is the number of tokens per block key. `offsets` are those within a key block at which
    a decoding request may take, publish or give back blocks. `progress(request)` says how many tokens of a
    generating request may be published by now. `numbered`: somebody asks for the numbers of blocks.
    `commits_late`: commits publish blocks, and may do so later than somebody looks for them. `key_lookahead`:
    how many tokens after a block its key covers; until they are known it can't be found.
    """

    def __init__(
        self,
        limits: Limits,
        log: EventLog,
        progress: Progress,
        eviction: Eviction,
        rules: WindowRules = DENSE,
        *,
        numbered: bool = True,
    ) -> None:
        self.num_blocks = limits.num_blocks
        self.recomputes_block = False
        self._dropping: frozenset[GroupSpec] = frozenset()  # what leaves out the last block of a hit
        self.key_lookahead = 0
        self.step_end = 0
        self._looks_ahead = False
        self.partial_reuse: PartialReuse | None = None
        if limits.partial_reuse and limits.caching:
            copies = limits.partial_reuse == "copy"
            self.partial_reuse = PartialReuse(limits.block_size, self.take_over, copies=copies)
        self.expiry = eviction.timed
        self.eviction = eviction
        self.block_size = limits.block_size
        self.caching = limits.caching
        self.log = log
        specs = limits.groups or (GroupSpec(KvKind.FULL, limits.block_size),)
        self._specs = specs
        self.aligned = aligned_tokens(specs)
        ledger = eviction.ledger
        if ledger is None and limits.tenants is not None:
            ledger = TenantLedger()
        rooted = self.partial_reuse is not None or not eviction.first_freed_first
        self._traced = rooted or ledger is not None  # whether extents know who wrote them
        # What is logged, offloaded or ranked is so group by group; otherwise equal groups go together.
        together = not self._traced and log.events is None and limits.host is None and eviction.blanks_first
        if log.events is not None or limits.host is not None or self.partial_reuse is not None:
            numbered = True
        self.pool = (
            ExtentPool(
                limits.num_blocks,
                log,
                numbered=numbered,
                blanks_first=eviction.blanks_first,
                ledger=ledger,
                rooted=rooted,
            )
            if eviction.first_freed_first
            else RankedExtentPool(limits.num_blocks, log, eviction, ledger=ledger, numbered=numbered)
        )
        self._numbered = have_numbers(self.pool.blanks)
        self._limits = limits
        self._rules = rules
        # Blocks leave a window one step after the plan of the one that no longer reads them.
        self.late = limits.held_batches > 1
        # Of waiting and running requests: where a prefix ends that only some layers had.
        self._junctions: dict[Request, int] = {}
        self.groups = self._make_groups(together=together)
        self.tables: dict[Request, Tables] = {}
        self.detached_tables: list[Table] = []  # taken from their requests, and still to be given back
        self._set_up_groups()
        self.writers = OutputWriters()
        self._progress = progress
        self.commits_late = False
        self._explicit: dict[Request, None] = {}  # then: generating requests with token ids
        self.crossing_blocks = len(specs)
        self.offsets = _offsets(specs, limits.block_size, late=self.late)
        self.fresh: dict[Request, None] = {}  # requests that have not decoded since their last chunk
        # Tokens of those that filled a block with their turn in the step being made, to be published later.
        self.filled: dict[Request, int] = {}
        # Free blocks that the first waiting request needs; 0: blocks do not hold it up.
        self.refused_blocks = 0
        # Groups whose tables grow; `crossing_blocks` counts the others too.
        self.growing_groups = sum([spec.rules.grows for spec in specs])
        self._window_groups = sum([spec.rules.windowed for spec in specs])
        self._at_once = sum([spec.rules.leaves_at_once(spec) for spec in specs])
        # Whether each group takes one block per key block, and what leaves a window was published before.
        equal = all(spec.block_size == limits.block_size for spec in specs if spec.rules.grows)
        # Then all tables of a request have as many places, unless a load is to fill some of them.
        scattered = any(group.scattered for group in self.groups)
        self._alike_groups = equal and len(self._growing) == len(self.groups) and not scattered
        self._alike = self._alike_groups and (limits.host is None or len(specs) == 1)
        # Where blocks have levels, what leaves a window may go ahead of what is free.
        in_order = eviction.first_freed_first and self.windows.leave_offset is not None
        self.regular = equal and (in_order or not self._window_groups) and not scattered
        # Whether blocks that leave a window may have no content, so that the next allocation takes them.
        self.leaves_blanks = bool(self._window_groups) and (rules.keeps_boundaries or not self.caching)
        self._notes_junctions = rules.keeps_boundaries or scattered
        self._sees_whole_prompt = rules.sees_whole_prompt and len(specs) > 1
        # Whether every group takes a block whenever a request begins one, and keeps it to the end.
        self.plain = self._alike_groups and not self._window_groups
        # Whether there is one such group, and nobody hears of each block that can be found from now on.
        self._publishes_rows = self.plain and len(specs) == 1 and log.events is None
        self._single = self._publishes_rows and not self._traced
        self.untold = "layers with windows tell nobody what they evict" if self._window_groups else ""

    def watch(self, watcher: Watcher) -> None:
        """Tells a watcher of the content of groups that keep every token.

        Of others a block does not stay findable until it is evicted. So Dynamo's router drops their events,
        and believes in prefixes whose windows are gone. Where several groups keep every token, a block that
        one of them evicts counts as gone.

        Errors: BadInput where there are none, or their blocks are not those that have keys.
        Source: ai-dynamo/dynamo, lib/kv-router/src/zmq_wire/filter.rs (`is_main_attention`).
        """
        specs = self._specs
        main = [number for number, spec in enumerate(specs) if spec.rules.keeps_all]
        if not main:
            raise BadInput("the model has no layers that keep every token")
        sizes = {specs[number].block_size for number in main}
        if sizes != {self.block_size}:
            raise BadInput(
                f"layers that keep every token have blocks of {max(sizes)} tokens, not of {self.block_size}"
            )
        if len(self.groups) < len(specs):
            self.divide()
        self.pool.watch(watcher, frozenset([mark_of(number, 1) for number in main]))

    def _make_groups(self, *, together: bool) -> list[LayerGroup]:
        """The groups; equal ones that follow one another are one `LayerGroup` where they go together."""
        specs = self._specs
        apart = [not together or spec.rules.scattered for spec in specs]
        alike = groupby(range(len(specs)), key=lambda index: index if apart[index] else specs[index])
        groups = []
        for _, indices in alike:
            first, *others = indices
            kind = CheckpointGroup if specs[first].rules.scattered else LayerGroup
            groups.append(kind(self.pool, specs[first], self._limits, self._rules, first, 1 + len(others)))
        return groups

    def _set_up_groups(self) -> None:
        """Prepares what follows from `groups`."""
        self.windows = Windows(self.groups, self.tables, self.block_size, late=self.late)
        growing = []
        first = 0
        self._number_of = [number for number, group in enumerate(self.groups) for _ in range(group.width)]
        for number, group in enumerate(self.groups):
            if group.spec.rules.grows:
                growing.append((number, first, group.width))
                first += group.width
        self._growing = growing
        self._units_of_first = max(self.groups[0].spec.block_size // self.block_size, 1)
        self._search = PrefixSearch(self.pool, self.groups, self.block_size, self.aligned)

    def begin_step(self) -> None:
        """Takes note that a step is being planned: what the ones before computed is there."""
        self.filled.clear()
        for group in self.groups:
            if group.just_stored:
                group.just_stored.clear()

    def read_ahead(self, tokens: int) -> None:
        """Takes note that steps have room for so many tokens beyond their own, for what drafts read."""
        self._looks_ahead = tokens > 0
        for group in self.groups:
            group.key_lookahead = self.key_lookahead

    def leave_out_last_blocks(self) -> None:
        """From now on hits leave out their last block, in groups with the drafter's layers or in all."""
        self.recomputes_block = True
        specs, drafter = self._specs, self._limits.drafter_groups
        self._dropping = frozenset([specs[number] for number in drafter] or specs)
        for group in self.groups:
            if group.spec in self._dropping or group.scattered:
                group.drop_last()

    # ---- finding

    def find(self, request: Request) -> Hit:
        return self._find(request, request.known_tokens - 1)

    def find_whole(self, request: Request) -> Hit:
        return self._find(request, request.known_tokens)

    def _find(self, request: Request, most: int) -> Hit:
        if not self.caching:
            return NO_HIT
        keys = request.keys
        self._junctions.pop(request, None)
        if self.writers.may_write(keys):
            self._catch_up_all(request)
        if self.pool.owed:
            if not self._search.may_find(keys):
                return NO_HIT
            self.pool.settle()
        seen = request.known_tokens if self._sees_whole_prompt else most
        hit = self._search.find(keys, most, seen, dropping=self._dropping)
        if self._notes_junctions and self._search.longest > hit.tokens:
            self._junctions[request] = self._search.longest
        if self.pool.broken and self._search.has_broken(hit):
            self.divide()
            return self._find(request, most)
        if self._explicit and keys.explicit and self._catch_up_behind(hit):
            return self._find(request, most)
        return hit

    def divide(self) -> None:
        """Lets every group go by itself from now on."""
        division = Division(self.pool)
        for tables in self.tables.values():
            tables.by_group = [
                each
                for table in self._dealt(tables)
                for each in (division.tables(table) if table.width > 1 else [table])
            ]
        shared = {group.index: group.shared_blocks for group in self.groups}
        self.groups = self._make_groups(together=False)
        for group in self.groups:
            group.shared_blocks = shared.get(group.index, 0)
            if group.spec in self._dropping or group.scattered:
                group.drop_last()
        self._set_up_groups()

    def fits(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        return self._fits(request, hit, tokens, reserved, capped=True)

    def fits_now(self, request: Request, hit: Hit, tokens: int, reserved: int = 0) -> bool:
        return self._fits(request, hit, tokens, reserved, capped=False)

    def _fits(self, request: Request, hit: Hit, tokens: int, reserved: int, *, capped: bool) -> bool:
        free = self.pool.free_blocks - reserved
        # A hit only lessens what is needed.
        if self._alike and -(-tokens // self.block_size) * self.growing_groups <= free:
            return True
        return self._needed(request, hit, tokens, capped=capped) <= free

    def still_needed(self, request: Request, start: int, tokens: int) -> int:
        """Blocks that a request, computed up to `start`, still takes for its first `tokens` tokens."""
        tables = self.tables_of(request)
        return sum(
            [
                group.still_needed(request, table, start, tokens)
                for group, table in zip(self.groups, tables, strict=True)
            ]
        )

    def _needed(self, request: Request, hit: Hit, tokens: int, *, capped: bool) -> int:
        blocks = 0
        for number, group in enumerate(self.groups):
            table = hit.tables[number] if hit.tables else None
            end = tokens if capped or not group.scattered else self._end(tokens)
            blocks += group.needed(request, table, hit.tokens, end, capped=capped)
        return blocks

    def missing(self, request: Request, tokens: int) -> int:
        by_group = self.tables_of(request)
        if self._alike:
            return self._missing_rows(by_group, tokens) * self.growing_groups
        return sum(self._missing(request, by_group, tokens))

    def _missing_rows(self, by_group: list[Table], tokens: int) -> int:
        """Rows that tables with as many places lack so that the first `tokens` tokens have a place."""
        rows = -(-tokens // self.block_size) - by_group[0].places
        return rows if rows > 0 else 0

    def _missing(self, request: Request, by_group: list[Table], tokens: int) -> list[int]:
        """Blocks that tables lack so that the first `tokens` tokens have a place."""
        end = self._end(tokens)
        return [
            group.missing(request, table, end if group.scattered else tokens)
            for group, table in zip(self.groups, by_group, strict=True)
        ]

    def _end(self, tokens: int) -> int:
        """Where a step ends that needs room for `tokens` tokens."""
        return min(tokens, self.step_end) if self._looks_ahead else tokens

    def refusal_may_change(self, request: Request, hit: Hit, *, coming: bool) -> bool:
        """A hit grows where it quotes a request that generates, and may help where it shrinks, if the first
        chunk was refused. Also notes for `refused_for` how many blocks the request needs (`refused_blocks`).
        """
        if self.plain and hit.tokens // self.block_size >= (request.known_tokens - 1) // self.block_size:
            return False
        self.refused_blocks = self._needed(request, hit, request.known_tokens, capped=True)
        if self.refused_blocks > self.num_blocks:
            return True  # the state that it found is still to be computed
        if coming or self.refused_blocks <= self.pool.free_blocks:
            return True
        return request.keys.explicit or self.writers.may_write(request.keys)

    def refused_for(self, count: int) -> int:
        """For how many steps of `count` decoding requests the one last refused would be refused again.

        Each of them may give a block back in every windowed group whenever it begins one, and a chunk at its
        end.
        """
        if not self.refused_blocks or not self._window_groups:
            return _LONG
        if self.fresh:
            return 0
        spare = self.refused_blocks - self.pool.free_blocks - 1 - count * self._at_once
        return max(spare // (count * self._window_groups) * self.block_size - 1, 0)

    def blocks_added(self, decodes: Growth, tick: int, ticks: int) -> int:
        if self.plain:
            return decodes.crossings(tick, ticks)[1] * self.crossing_blocks
        added = 0
        requests = list(decodes.requests)
        for request in requests:
            last = tick - request.lag + ticks - 1
            added += self.missing(request, last + 1)
        last = tick + ticks - 1
        return added - self.windows.freed_blocks(self.windows.leavers(requests, last))

    def head_start(self, request: Request, hit: Hit) -> HeadStart:
        if not self.plain:
            return NO_START  # blocks of some layers may have left a window
        if request.parent is not None and (tokens := self._fork_tokens(request, request.parent, hit)):
            return HeadStart(tokens, StartKind.FORK)
        tokens = min(request.swapped_tokens, request.known_tokens - 1) - hit.tokens
        if tokens > 0 and request.swapped_tokens:
            return HeadStart(tokens, StartKind.SWAP)
        if self.partial_reuse is None or not hit.tables:
            return NO_START
        if self.caching:
            self._catch_up_after(hit.tables[0])
        return self.partial_reuse.find(request.keys, hit.tables[0], request.known_tokens)

    def _fork_tokens(self, request: Request, parent: Request, hit: Hit) -> int:
        """Tokens beyond a hit that the request's parent has in its next block: a copy of it saves them."""
        if parent.state not in (State.DECODE, State.DRAINING):
            return 0
        tokens = min(request.prompt_tokens, request.known_tokens - 1) - hit.tokens
        return tokens if 0 < tokens < self.block_size else 0

    def _catch_up_behind(self, hit: Hit) -> bool:
        """Publishes what has been committed of requests with token ids that go on behind a hit.

        Returns whether there was anything.
        """
        last = hit.tables[0].parts[-1][0] if hit.tables and hit.tables[0].parts else None
        if last is None or not last.holders:
            return False
        found = False
        for request in self._explicit:
            by_group = self.tables[request].by_group
            if by_group[0].held and by_group[0].last_extent() is last:
                stored = [table.stored for table in by_group]
                self._publish(request, self._progress(request))
                found |= stored != [table.stored for table in by_group]
        return found

    def _catch_up_after(self, hit: TableHit) -> None:
        """Publishes what generating requests have computed by now that goes on right behind a hit."""
        last, _, _ = hit.parts[-1]
        if not last.holders:
            return
        for request in [*self.writers, *self._explicit]:
            table = self.tables[request].by_group[0]
            if table.held and table.last_extent() is last:
                self._publish(request, self._progress(request))

    # ---- claiming and growing

    def tables_of(self, request: Request) -> list[Table]:
        """A request's tables, in the order of `groups`; empty ones where it holds nothing."""
        tables = self.tables.get(request)
        if tables is None:
            return [group.new_table() for group in self.groups]
        return self._dealt(tables)

    def _open(self, request: Request, by_group: list[Table]) -> Tables:
        """Gives a request its tables."""
        tables = self.tables[request] = Tables(by_group, self.pool.nothing)
        if self._traced:
            keeps = None
            if request.retention is not None and self.pool.rooted:
                keeps = request.retention.of_blocks(self.block_size, request.prompt_tokens)
            origin = Origin(request.keys, keeps, request.tenant)
            for group, table in zip(self.groups, by_group, strict=True):
                table.origin = origin
                table.rooted = self.pool.rooted and group.spec.rules.keeps_all
        return tables

    def _note_begun(self, request: Request, tables: Tables, *, generates: bool = False) -> None:
        """Notes when the segments were begun in which a request has places."""
        table = tables.by_group[0]
        origin = table.origin
        if origin is None or self.eviction.first_freed_first:
            return  # no order asks for it
        keys = request.keys
        last = table.places * self._units_of_first - 1
        segments = len(keys.digests) - 1 if generates and not keys.explicit else -1
        begun = segment_of(keys, last) if last >= 0 else -1
        first = segment_of(keys, table.stored * self._units_of_first)
        for segment in [*range(first, begun + 1), *([segments] if segments > begun else [])]:
            if segment not in origin.made:
                self.pool.births += 1
                origin.made[segment] = self.pool.births

    def take_over(self, request: Request, extent: Extent) -> None:
        """Gives a request the last block of a cached extent, which nobody holds, as its next one."""
        tables = self.tables[request]
        table = self._dealt(tables)[0]
        if table.places >= extent.end:  # split while the prefix was claimed
            children = table.last_extent().children or ()
            extent = next(child for child in children if child.is_rest and child.number == table.places)
        if self.pool.ledger is not None:
            self.pool.ledger.taker = request.tenant
        self.groups[0].grow(request, table, self.pool.take_last(extent))
        self._note_begun(request, tables)

    def _dealt(self, tables: Tables) -> list[Table]:
        """Deals the pending blocks out to their groups. Returns the tables."""
        by_group = tables.by_group
        rows = tables.pending
        if rows:
            tables.pending = 0
            step = self.growing_groups
            blocks = tables.blocks
            tables.blocks = self.pool.nothing
            for number, first, width in self._growing:
                table = by_group[number]
                table.places += rows
                if self._numbered:
                    table.tail = table.tail + columns_of(blocks, step, first, width)
                else:
                    table.tail = table.tail + self.pool.unnumbered[: rows * width]
        return by_group

    def claim(self, request: Request, hit: Hit) -> None:
        tables = []
        for number, group in enumerate(self.groups):
            tables.append(group.claim(request, hit.tables[number] if hit.tables else None, hit.tokens))
        self._open(request, tables)
        if self._traced and hit.tables:
            self._keep_anew(tables)

    def _keep_anew(self, by_group: list[Table]) -> None:
        """Gives the blocks of a claimed prefix the retention that their new holder asks for.

        Priorities of others last from now on, unless their new holder asks for an end again: as `claimBlock`
        of TensorRT-LLM, which keeps a priority that is not asked for anew, but no duration.
        """
        for table in by_group:
            if table.origin is None:
                continue
            if self.expiry is not None:
                for extent in table.extents():
                    if extent.keep is not None and extent.keep.duration_ns is not None:
                        extent.keep = Keep(extent.keep.priority)
            for first, end, keep in table.origin.retention or ():
                if keep is None:
                    continue
                for extent in table.extents():
                    low, high = max(first, extent.number), min(end, extent.end)
                    if low >= high:
                        continue
                    part = extent
                    if low > part.number:
                        part = self.pool.split(part, (low - part.number) // part.units)
                    if high < part.end:
                        self.pool.split(part, (high - part.number) // part.units)
                    part.keep = keep

    def leave(self, request: Request, computed: int) -> None:
        if computed < self.windows.least:
            return
        for number in self.windows.numbers:
            skipped = self.groups[number].spec.skipped_blocks(computed)
            if skipped:
                self._leave(request, number, skipped)

    def _leave(self, request: Request, number: int, skipped: int) -> None:
        tables = self.tables[request]
        table = tables.by_group[number]
        if skipped > table.stored:
            self._dealt(tables)
            if table.nulls < table.unasked:
                self._catch_up(request)
        self.groups[number].leave(request, table, skipped)

    def leave_in_turn(self, leavers: list[Leaver]) -> None:
        """Lets these rows leave their windows, one after another."""
        done = self.pool.drop_in_turn(leavers)
        while done < len(leavers):
            request, _, number, skipped = leavers[done]
            self._leave(request, number, skipped)
            done += 1
            done += self.pool.drop_in_turn(leavers[done:])

    def order_matters(self, crossings: int) -> bool:
        """Whether it matters in which order requests begin so many blocks and others leave windows."""
        if not self.leaves_blanks:
            return False
        return self._numbered or len(self.pool.blanks) < crossings * self.growing_groups

    def grow(self, request: Request, tokens: int) -> None:
        tables = self.tables.get(request)
        if tables is None:
            tables = self._open(request, self.tables_of(request))
        by_group = self._dealt(tables) if tables.pending else tables.by_group
        if self.pool.ledger is not None:
            self.pool.ledger.taker = request.tenant
        if self._alike and self.log.events is None:
            rows = self._missing_rows(by_group, tokens)
            if rows:
                taken = self.pool.take(rows * self.growing_groups)
                first = 0
                for table in by_group:
                    last = first + rows * table.width
                    table.add_rows(taken[first:last], rows)
                    first = last
        else:
            self._take(request, by_group, self._missing(request, by_group, tokens), tokens)
        if self._traced:
            self._note_begun(request, tables)

    def grow_for_load(self, request: Request, tokens: int) -> None:
        """Takes blocks for the first `tokens` tokens of a request, as far as a load fills them.

        A group none of whose layers reads these tokens any more (a window of one token) takes none yet.
        """
        self.step_end = tokens
        for group, table in zip(self.groups, self.tables_of(request), strict=True):
            if group.spec.skipped_tokens(tokens) < tokens:
                rows = max(-(-tokens // group.spec.block_size) - table.places, 0)
                group.grow(request, table, self.pool.take(rows * group.width))

    def _take(self, request: Request, by_group: list[Table], missing: list[int], tokens: int) -> None:
        """Takes so many blocks for each table of a request, group by group."""
        logs = self.log.events is not None
        taken = self.pool.nothing if logs else self.pool.take(sum([max(blocks, 0) for blocks in missing]))
        first = 0
        for group, table, blocks in zip(self.groups, by_group, missing, strict=True):
            if blocks <= 0 and not group.scattered:
                continue
            blocks = max(blocks, 0)
            got = self.pool.take(blocks) if logs else taken[first : first + blocks]
            first += blocks
            if group.scattered:
                group.arrange(request, table, got, self._end(tokens))
            elif logs:
                group.grow(request, table, got)
            else:
                table.add_rows(got, blocks // table.width)

    def grow_many(self, requests: list[Request], crossings: int) -> None:
        step = self.growing_groups
        if self.pool.ledger is None:
            taken = self.pool.take(crossings * step)
        else:
            takers = [request.tenant for request in requests for _ in range(step)]
            taken = self.pool.take_in_turn(crossings * step, takers)
        tables = self.tables
        if not self._numbered:
            for request in islice(cycle(requests), crossings):
                tables[request].pending += 1
            return
        for first, request in zip(range(0, crossings * step, step), cycle(requests), strict=False):
            each = tables[request]
            each.pending += 1
            each.blocks = each.blocks + taken[first : first + step]

    def generate(self, request: Request) -> None:
        if self._window_groups:
            self.fresh[request] = None
        if self.commits_late and request.keys.explicit:
            self._explicit[request] = None
        if self._traced:
            tables = self.tables[request]
            self._dealt(tables)
            self._note_begun(request, tables, generates=True)
        if self.writers.others_write(request):
            self._catch_up_all(request)
        self.writers.add(request)

    def keep_fresh(self, decoding: dict[Request, None]) -> None:
        """Leaves in `fresh` only requests that still decode."""
        for request in [request for request in self.fresh if request not in decoding]:
            del self.fresh[request]

    # ---- publishing and giving back

    def publish(self, request: Request, tokens: int) -> None:
        if not self.caching:
            return
        if self.writers.others_write(request):
            self._catch_up_all(request)
        self._publish(request, tokens)

    def _publish(self, request: Request, tokens: int) -> None:
        tables = self.tables.get(request)
        if tables is None or tokens <= tables.published:
            return
        by_group = self._dealt(tables) if tables.pending else tables.by_group
        table = by_group[0]
        alone = self._publishes_rows and (table.origin is None or table.origin.retention is None)
        if alone and not self.key_lookahead and not self.recomputes_block:
            tables.published = tokens
            full = tokens // self.block_size
            if full > table.places:
                full = table.places
                tables.published = 0  # there is more to publish once there are places
            if full > table.stored:
                self.groups[0].publish_rows(request.keys, table, full)
            return
        computed = whole = tokens // self.aligned * self.aligned
        if self.key_lookahead:
            # Whole pieces are those of computed tokens, also where the last key is not known yet.
            known = request.known_tokens - self.key_lookahead
            whole = min(whole, known // self.block_size * self.block_size)
        else:
            tables.published = tokens
        alike = self._alike and not self.recomputes_block
        full = whole // self.block_size
        if alike and full > by_group[0].places:
            full = by_group[0].places
            tables.published = 0  # there is more to publish once there are places
        earlier = None
        parts: list[Part] = []
        boundaries = self._boundaries(request) if self._rules.keeps_boundaries else []
        below = self.recomputes_block and self._rules.keeps_below and request in self._junctions
        for group, table in zip(self.groups, by_group, strict=True):
            if not alike:
                full = group.full(table, whole, tokens)
                if full == table.places:
                    tables.published = 0  # perhaps there is more to publish once there are places
            stored = table.stored
            if full > stored:
                wanted = stored if stored > table.nulls else table.nulls, full, group.pieces
                kept = boundaries
                if below:
                    kept = [*boundaries, self._junctions[request] - group.spec.block_size]
                if wanted != earlier:
                    parts = group.parts(request.keys, table, full, kept)
                    earlier = wanted
                group.publish(request, table, full, parts, kept)
            if group.names_partial:
                ends = self._rules.names_ends or self.recomputes_block
                named = request.prompt_tokens - (not ends)
                group.name_partial(request, table, computed, tokens, named // self.block_size)

    def _boundaries(self, request: Request) -> list[int]:
        """The tokens after which a hit may end that a prompt like this one, or one that goes on, finds."""
        prompt = request.prompt_tokens
        boundaries = [prompt - 1]
        if self.recomputes_block:
            aligned = self.aligned
            ends = (prompt - 1) // aligned, prompt // aligned
            boundaries = [max(end * aligned - aligned, 0) for end in ends]
        junction = self._junctions.get(request)
        if junction:
            boundaries.append(junction)
        return boundaries

    def junction(self, request: Request) -> int:
        """The tokens that only some layers had of a request's prefix when it was last looked up; or 0."""
        return self._junctions.get(request, 0)

    def hit_ends(self, request: Request) -> tuple[int, ...]:
        """The tokens after which a load may end that a prompt like this one asks for, or a longer one."""
        junction = self._junctions.get(request)
        return (request.prompt_tokens - 1, junction) if junction else (request.prompt_tokens - 1,)

    def publishes_later(self, request: Request) -> bool:
        """Whether what a decoding request fills is published when somebody may look for it.

        Nobody else may publish the same in this step.
        """
        return (
            self.regular and not self.writers.rivals and not request.keys.explicit and self.log.events is None
        )

    def _catch_up_all(self, request: Request) -> None:
        """Publishes what those have computed by now that write content of a request."""
        if self.caching:
            for writer in self.writers.of(request.keys):
                if writer is not request:
                    self._publish(writer, self._progress(writer))

    def _catch_up(self, request: Request) -> None:
        """Publishes what a request has computed by now, if it generates."""
        if self.caching and self.writers.write(request):
            self._publish(request, max(self._progress(request), self.filled.get(request, 0)))

    def withdraw(self, request: Request, tokens: int) -> None:
        """What another request claimed in the meantime stays: the plan that fills it comes before its own."""
        tables = self.tables.get(request)
        if tables is None:
            return
        self.writers.remove(request)  # nothing of it is made up for later
        self._explicit.pop(request, None)
        for group, table in zip(self.groups, self._dealt(tables), strict=True):
            group.withdraw(table, tokens // group.spec.block_size)
        tables.published = min(tables.published, tokens)

    def release(self, request: Request) -> None:
        tables = self._take_tables(request)
        for group, table in zip(self.groups, tables, strict=False):
            group.release(request, table)

    def _take_tables(self, request: Request) -> list[Table]:
        """Takes a request's tables from it; none where it holds nothing."""
        if not self._single:
            self._catch_up(request)
            self.fresh.pop(request, None)
            self.filled.pop(request, None)
            self._junctions.pop(request, None)
        self.writers.remove(request)
        self._explicit.pop(request, None)
        tables = self.tables.pop(request, None)
        if tables is None:
            return []
        dealt = self._dealt(tables)
        if self._single:
            return dealt
        for group, table in zip(self.groups, dealt, strict=True):
            group.keep_partial(table)
        return dealt

    def detach(self, request: Request) -> Callable[[], None]:
        """Takes a request's blocks from it, to be given back later by what is returned.

        Until then they count as used, and their content can be found. They are given back group by group, the
        last group first, all at once (as vLLM's deferred frees).
        """
        tables = self._take_tables(request)
        detached = Table(self.pool.nothing)
        for table in tables:
            detached.held += table.held
            if table.tail:
                detached.add([Extent(table.tail, None, 0, 1)])
        self.detached_tables.append(detached)

        def give_back() -> None:
            self.detached_tables.remove(detached)
            extents = detached.extents()
            freed_blocks = self.pool.to_be_freed(extents, detached.tail)
            self.groups[0].shared_blocks -= self.pool.drop(extents, detached.tail)
            if freed_blocks:
                self.log.add(EventKind.FREED, request.id, freed_blocks)

        return give_back

    def evict(self, blocks: int) -> int:
        blocks = min(blocks, self.pool.free_blocks)
        self.pool.evict(blocks)
        return blocks

    # ---- for a lower tier (`tiers/offloading.py`)

    @property
    def null(self) -> int:
        """The number that stands in tables for blocks that are not kept."""
        return self.num_blocks

    def blocks_from(self, request: Request, group: int, first: int) -> list[int]:
        """A request's block table in one group from a place on."""
        table, column = self._table(request, group)
        return table.by_place(self.null, column)[first:] if first < table.places else []

    def first_unknown(self, request: Request, group: int, last: int) -> int:
        """The first of a table's first `last` places that a load has to fill: its block has no content."""
        table, _ = self._table(request, group)
        return table.first_unknown(last)

    def take_states(self) -> list[HandedState]:
        """The recurrent states that were published since the last call, and whose blocks are held still."""
        states: list[HandedState] = []
        for group in self.groups:
            if group.handed:
                states += group.handed
                group.handed.clear()
        return states

    def watch_allocations(self, *, on: bool) -> None:
        """Takes note of every block taken from now on, or of none."""
        self.pool.allocations = [] if on else None

    def take_allocations(self) -> list[int]:
        """The blocks taken since the last call, as far as they were noted."""
        allocations = self.pool.allocations
        if not allocations:
            return []
        self.pool.allocations = []
        return allocations

    # ---- stretches of decode steps

    def quiet(self, decodes: Growth, tick: int, count: int, ticks: int) -> int:
        """Blocks that leave windows in the meantime are not counted on."""
        free = self.pool.free_blocks // self.crossing_blocks
        if (ticks // self.block_size + 1) * count <= free:
            return ticks
        return min(ticks, decodes.ticks_within(tick, free))

    # ---- figures

    @property
    def free_blocks(self) -> int:
        return self.pool.free_blocks

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.pool.free_blocks

    @property
    def evicted_blocks(self) -> int:
        return self.pool.evicted_blocks

    def eviction_figures(self) -> dict[str, object]:
        return self.eviction.figures()

    @property
    def ledger(self) -> TenantLedger | None:
        return self.pool.ledger

    def shared_tokens(self) -> int:
        tokens = 0
        for group in self.groups:
            if group.shared_blocks:
                tokens += group.shared_blocks * group.spec.block_size
        return tokens

    def holds(self, request: Request) -> bool:
        return request in self.tables

    def blocks(self, request: Request, group: int = 0) -> list[int]:
        table, column = self._table(request, group)
        return table.by_place(self.null, column)

    def last_block(self, request: Request, group: int = 0) -> int:
        table, column = self._table(request, group)
        return table.last_block(column)

    def _table(self, request: Request, group: int) -> tuple[Table, int]:
        """The table that has a group, and the group's column in it."""
        number = self._number_of[group]
        return self.tables_of(request)[number], group - self.groups[number].index

    def findable_blocks(self) -> set[int]:
        if self.log.events is None:  # a log has each block when the engine publishes it
            for request in self.tables:
                self._catch_up(request)
        return self.pool.findable()


def _offsets(specs: tuple[GroupSpec, ...], unit: int, *, late: bool) -> tuple[int, ...]:
    offsets = {0, unit - 1}
    for spec in specs:
        offsets |= spec.rules.offsets(spec, unit)
    if late:
        offsets |= {(offset + 1) % unit for offset in offsets}
    return tuple(sorted(offsets))
