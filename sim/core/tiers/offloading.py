"""Offloading: when blocks of KV are stored in host memory, and when they are loaded again.

The rules are those of vLLM's OffloadingConnector. Prompts are stored in whole blocks, as soon as the step
that computes them is planned; the copy follows the step. A waiting request asks for what follows its prefix
hit. It may be told to ask again (`ask` returns None): blocks it wants are still being stored, or another
request is loading them. A request that loads waits in the queue and holds its blocks.

Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py (0.24; what newer versions
changed is in `OffloadRules`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pagecast.sim.core.decoders import admission_order
from pagecast.sim.core.events import EventKind, EventLog
from pagecast.sim.core.limits import Limits
from pagecast.sim.core.memory.kv_memory import KvMemory
from pagecast.sim.core.memory.layer_group import HandedState
from pagecast.sim.core.plan import Chunk, Transfer
from pagecast.sim.core.request import Request, State
from pagecast.sim.core.running import Running
from pagecast.sim.core.tier_spec import HostTierSpec
from pagecast.sim.core.tiers.host_blocks import HostBlocks
from pagecast.sim.core.tiers.offload_lookup import OffloadLookup
from pagecast.sim.core.tiers.offload_rules import OffloadRules
from pagecast.sim.core.tiers.offloaded_group import OffloadedGroup, offloaded_groups
from pagecast.sim.core.tiers.progress import OffloadProgress, TransferJob
from pagecast.sim.core.tiers.request_access import RequestAccess
from pagecast.sim.core.tiers.watched_blocks import WatchedBlocks


class Ending(NamedTuple):
    """A request that has ended: `tokens` of it may be stored, near `hit_ends` where only these count."""

    tokens: int
    hit_ends: tuple[int, ...]


class Offloading:
    """The host tier of one replica, and the transfers to and from it.

    `loading` are the requests whose load is under way. `holders` are all that hold blocks and wait in the
    queue: those that load, and those whose load has ended. One whose load has failed without a prefix hit
    stays among them, although it has no blocks any more. `jobs` are the transfers under way by number.
    `hit_ends(request)`: after which tokens a hit may end, where only blocks near these places are kept.
    """

    def __init__(
        self,
        spec: HostTierSpec,
        limits: Limits,
        memory: KvMemory,
        running: Running,
        log: EventLog,
        rules: OffloadRules,
        hit_ends: Callable[[Request], tuple[int, ...]] | None = None,
    ) -> None:
        self.spec = spec
        self.rules = rules
        self.host = self._make_host(spec)
        self.jobs: dict[int, TransferJob] = {}
        self.loading: dict[Request, None] = {}
        self.holders: dict[Request, None] = {}
        self.loaded_blocks = 0
        self.stored_blocks = 0
        self.lost_loads = 0
        self.groups: tuple[OffloadedGroup, ...] = offloaded_groups(
            limits,
            spec.factor,
            rules,
            drops_last=memory.recomputes_block,
            near_boundaries=hit_ends is not None,
        )
        self.memory = memory
        self._hit_ends = hit_ends
        self._endings: dict[Request, Ending] = {}  # of requests whose last blocks the next plan stores
        self._running = running
        self._log = log
        self._caching = limits.caching
        self._progress: dict[Request, OffloadProgress] = {}
        self._numbers = 0
        self._abandoned: set[Request] = set()  # ended while it was loading: its blocks are given back later
        self._arrived: set[Request] = set()  # their loads have ended; nobody took note of it yet
        self._failed: set[Request] = set()  # and failed
        # Blocks to be given back after a step, by its number.
        self.deferred_frees: deque[tuple[int, Callable[[], None]]] = deque()
        self._refused: set[Request] = set()  # there was no room when they last stored something
        self._room_made = False  # a transfer has ended since somebody tried
        self._has_states = any(group.handed for group in self.groups)
        self._lookup = OffloadLookup(self.groups, self.host, rules)
        self._watched = WatchedBlocks(memory, self.groups, spec.factor)
        if log.kv is not None:
            self.host.changes = []

    def is_abandoned(self, request: Request) -> bool:
        """Whether a request has ended while it was loading, and keeps its blocks until the load has."""
        return request in self._abandoned

    def has_transfers(self, request: Request) -> bool:
        """Whether transfers of a request, live or not, are under way, or come with the next plan."""
        progress = self._progress.get(request)
        return progress is not None and (bool(progress.jobs) or request in self._endings)

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks of requests that have gone are still kept for a load or a step."""
        return bool(self._abandoned or self.deferred_frees)

    def _make_host(self, spec: HostTierSpec) -> HostBlocks:
        return HostBlocks(spec.blocks, spec.policy.eviction_policy, spec.policy.store_threshold, self.rules)

    def _make_progress(self, request: Request) -> OffloadProgress:
        progress = self._progress[request] = OffloadProgress(len(self.groups))
        if self.rules.by_request:
            progress.access = RequestAccess(progress.names, [group.size for group in self.groups])
        return progress

    # ---- quiet time

    @property
    def quiet_steps(self) -> int:
        """How many decode steps may be planned ahead.

        0 where blocks are watched or stores tried again: one that was refused may fit once a transfer has
        ended, or once fewer of its blocks are in a window. 1 where blocks may be given back meanwhile, or a
        log says in which step a transfer ended. Else the end of a transfer changes nothing they could see.
        """
        if self._watched.stores or self._endings or not self.spec.policy.offload_prompt_only:
            return 0
        if self._refused and (self.jobs or self._room_made or self._lookup.windows):
            return 0
        if self.deferred_frees or self.loading or (self.jobs and self._log.events is not None):
            return 1
        return 1 << 62

    @property
    def settled(self) -> bool:
        """Whether a waiting request that was refused gets the same answer again while others only decode."""
        return not self.jobs and self.host.settles

    # ---- loading

    def ask(self, request: Request, local: int) -> int | None:
        """Tokens that a waiting request can load beyond its prefix hit of `local`; None: ask again later."""
        progress = self._progress.get(request)
        if progress is None:
            progress = self._make_progress(request)
        else:
            for table in progress.tables:
                table.clear()
            if self.rules.offers_again:
                progress.stored = [0] * len(self.groups)
            if progress.jobs:
                return None
        return self._lookup.tokens(progress, request, local)

    def load(self, request: Request, tokens: int) -> Transfer:
        """Begins to load `tokens` tokens beyond the prefix hit that `ask` was told of.

        The request has blocks for them, whose content is unknown so far.
        """
        progress = self._progress[request]
        cached = progress.local + tokens
        factor = self.spec.factor
        names_to_load: list[int] = []
        parts: list[tuple[list[int], int, int]] = []
        for group, names in zip(self.groups, progress.names, strict=True):
            table = self.memory.blocks(request, group.number)
            last = -(-cached // group.block_size)
            first = self.memory.first_unknown(request, group.number, last)
            offloaded = -(-cached // group.size)
            parts.append((table[first:last], first, len(names_to_load) - first // factor))
            if first < last:
                names_to_load += names[first // factor : offloaded]
            progress.stored[group.number] = offloaded
        slots = self.host.pin(names_to_load, progress.access)
        blocks: list[int] = []
        places: list[int] = []
        for part, first, shift in parts:
            blocks += part
            for number in range(first, first + len(part)):
                places.append(slots[shift + number // factor] * factor + number % factor)
        job = self._begin(request, progress, names_to_load, blocks, is_store=False)
        self.loading[request] = None
        self.holders[request] = None
        self.loaded_blocks += len(blocks)
        if self._caching:
            self._lookup.being_loaded.update(names_to_load)
        if self._log.events is not None:
            self._log.add(EventKind.LOADING, request.id, blocks, detail=f"job={job.number}")
        return Transfer(job.number, request, tuple(blocks), tuple(places))

    def _begin(
        self,
        request: Request,
        progress: OffloadProgress,
        names: list[int],
        blocks: Sequence[int],
        *,
        is_store: bool,
    ) -> TransferJob:
        number = self._numbers
        job = self.jobs[number] = TransferJob(number, request, names, blocks, is_store=is_store)
        self._numbers = number + 1
        progress.jobs.append(number)
        return job

    def take_arrived(self, request: Request) -> bool:
        """Whether a request's load has ended since this was asked last."""
        if request not in self._arrived:
            return False
        self._arrived.remove(request)
        return True

    def take_failed(self, request: Request) -> bool:
        """Whether a request's load has failed since this was asked last."""
        if request not in self._failed:
            return False
        self._failed.remove(request)
        self._arrived.discard(request)
        return True

    def end_holding(self, request: Request) -> None:
        """A request whose load has ended runs from now on, or waits without blocks."""
        self.holders.pop(request, None)

    def reserved_blocks(
        self,
        max_model_len: int | None,
        completed: Mapping[Request, None],
        starts: Mapping[Request, int],
        *,
        drafts: int = 0,
        beside: int = 0,
    ) -> int:
        """Blocks that requests with chunks to come, and those that loaded or load, will still take.

        `completed`: so will these, of which the plan in the making computes the rest. `starts`: up to where
        requests are computed without this plan. `drafts`: so many draft tokens of each are counted, too.
        `beside`: as are so many blocks.
        """
        reserved = 0
        for request in {**self.holders, **self._running.chunked, **completed}:
            if request.state is not State.DECODE:
                tokens = request.known_tokens
                if max_model_len is not None and tokens > max_model_len:
                    tokens = max_model_len
                start = starts.get(request, request.computed_tokens)
                reserved += self.memory.still_needed(request, start, tokens + drafts) + beside
        return reserved

    # ---- storing

    def stores(
        self,
        chunks: Sequence[Chunk],
        decodes: Sequence[Request],
        newcomers: Iterable[Request],
        *,
        preempted: bool,
    ) -> list[Transfer]:
        """The transfers that store blocks after the step that computes these chunks and tokens.

        `newcomers`: the requests admitted, or that began to load, in this step. Notes which stores must be
        done before it (`take_flushed`).
        """
        if self._watched.stores or self._lookup.windows or self._endings:
            self._watched.begin_step(chunks, decodes, newcomers, self._progress, preempted=preempted)
        self._room_made = False
        transfers: list[Transfer] = []
        if self._has_states:
            transfers += self._store_states()
        for request, tokens in self._storing(chunks, decodes):
            transfer = self._store(request, tokens)
            if transfer is not None:
                transfers.append(transfer)
        if self._endings:
            transfers += self._store_endings()
        self._tell_changes()
        return transfers

    def _store_states(self) -> list[Transfer]:
        """Stores recurrent states that have just been published, each by itself."""
        transfers = []
        factor = self.spec.factor
        by_request: dict[Request, list[HandedState]] = {}
        for state in self.memory.take_states():
            by_request.setdefault(state.request, []).append(state)
        for state in chain.from_iterable(by_request.values()):
            request = state.request
            group = self.groups[state.group]
            most = request.known_tokens
            if self.spec.policy.offload_prompt_only:
                most = min(most, request.prompt_tokens)
            if state.tokens > most or state.tokens % group.size:
                continue
            progress = self._progress.get(request) or self._make_progress(request)
            self._lookup.extend(progress, request, state.tokens)
            name = progress.names[state.group][state.tokens // group.size - 1]
            if self.host.reserve([name], (), progress.access):
                job = self._begin(request, progress, [name], [state.block], is_store=True)
                self._watched.watch(job.blocks, job.number)
                transfers.append(self._transfer(job, [self.host.slots[name] * factor + factor - 1]))
        return transfers

    def _storing(self, chunks: Sequence[Chunk], decodes: Sequence[Request]) -> list[tuple[Request, int]]:
        """The requests that may have something to store, in admission order, and up to which token."""
        prompt_only = self.spec.policy.offload_prompt_only
        storing = []
        for chunk in chunks:
            request = chunk.request
            tokens = chunk.start + chunk.tokens
            # A prompt is never more than what is known.
            most = request.prompt_tokens if prompt_only else request.known_tokens
            storing.append((request, tokens if tokens < most else most))
        if prompt_only and not self._refused:
            return storing
        late = False
        for request in decodes:
            if prompt_only:
                if request in self._refused:
                    storing.append((request, request.prompt_tokens))
                    late = True
            else:
                storing.append((request, self._decided(request)))
                late = True
        if late and chunks:
            storing.sort(key=lambda one: admission_order(one[0]))
        return storing

    def _decided(self, request: Request) -> int:
        """The tokens of a decoding request whose content is decided before the step."""
        running = self._running
        if running.speculates(request):
            return request.known_tokens  # plans count draft tokens, too
        return running.planned(request) - (not running.publishes_at_once(request))

    def _store(self, request: Request, tokens: int) -> Transfer | None:
        progress = self._progress.get(request)
        if progress is None:
            progress = self._make_progress(request)
        if request in self._refused:
            self._refused.remove(request)
            if request.state is State.DECODE:
                # Blocks of its output may be stored for others: they are touched with its own.
                self._lookup.extend(progress, request, self._decided(request))
        if self._lookup.plain:
            return self._store_plain(request, progress, tokens)
        self._lookup.extend(progress, request, tokens)
        if not self._lookup.windows:
            tables = [self.memory.blocks(request, group.number) for group in self.groups]
        else:
            tables = progress.tables
        ends = None if self._hit_ends is None else self._hit_ends(request)
        return self._store_groups(request, progress, tokens, tables, ends)

    def _store_endings(self) -> list[Transfer]:
        """Stores what requests left that have ended since the last plan. They store nothing any more."""
        transfers = []
        for request, ending in self._endings.items():
            progress = self._progress[request]
            self._lookup.extend(progress, request, request.prompt_tokens + request.output_tokens)
            transfer = self._store_groups(request, progress, ending.tokens, progress.tables, ending.hit_ends)
            if transfer is not None:
                transfers.append(transfer)
                self._watched.watch_late(self.jobs[transfer.job].blocks, transfer.job)
        for request in self._endings:
            self._end(request, self._progress[request])
        self._endings.clear()
        self._watched.relax(noting=False)
        return transfers

    def _end(self, request: Request, progress: OffloadProgress) -> None:
        """A request has stored all that it ever will."""
        progress.ended = True
        if progress.access is not None:
            self.host.ended(progress.access)
        if not progress.jobs:
            del self._progress[request]

    def _storable(self, group: OffloadedGroup, request: Request, tokens: int) -> int:
        """How many of the offloaded blocks of a request's first tokens may be stored, from the start."""
        last = tokens // group.size
        if not group.drops_last:
            return last
        settled = request in self._endings and self.rules.leaves_last_token
        if self.rules.stores_prompt_ends and (settled or tokens <= request.prompt_tokens):
            return last
        return max(0, last - 1)

    def _advance(self, progress: OffloadProgress, group: OffloadedGroup, tokens: int, last: int) -> None:
        """Takes note that a group's blocks up to the `last` that may be stored of so many tokens need no
        storing any more."""
        if not self.rules.stores_prompt_ends:
            progress.stored[group.number] = tokens // group.size
        elif last > progress.stored[group.number]:
            progress.stored[group.number] = last

    def _store_groups(
        self,
        request: Request,
        progress: OffloadProgress,
        tokens: int,
        tables: list[list[int]],
        hit_ends: tuple[int, ...] | None,
    ) -> Transfer | None:
        """Stores a request's blocks up to a token. `tables`: its device blocks, group by group."""
        lasts: list[int] = []  # per group
        names: list[int] = []
        factor = self.spec.factor
        for group in self.groups:
            number = group.number
            last = self._storable(group, request, tokens)
            if request in self._endings:
                last = min(last, len(tables[number]) // factor, len(progress.names[number]))
            lasts.append(last)
            first = progress.stored[number]
            if last <= first or group.handed:
                continue
            of_group = progress.names[number]
            if not group.window:
                names += of_group[first:last]
                continue
            near = group.near(hit_ends) if hit_ends is not None and group.aligned else None
            for place in range(first, last):
                if self._is_wanted(group, place, last, tables[number], near):
                    names.append(of_group[place])
        new_names = self.host.reserve(names, (), progress.access) if names else []
        if new_names is None:
            if request not in self._endings:
                self._refused.add(request)
            return None
        if not new_names:
            for group, last in zip(self.groups, lasts, strict=True):
                self._advance(progress, group, tokens, last)
            return None
        self._lookup.touch(progress)
        transfer = self._copy(request, progress, new_names, tables, lasts)
        for group, last in zip(self.groups, lasts, strict=True):
            self._advance(progress, group, tokens, last)
        return transfer

    def _is_wanted(
        self, group: OffloadedGroup, place: int, last: int, table: list[int], near: list[range] | None
    ) -> bool:
        """Whether the offloaded block at a place of a window's table is there, and may be of use."""
        factor = self.spec.factor
        null = self.memory.null
        blocks = range(place * factor, (place + 1) * factor)
        if table[blocks[-1]] == null:
            return False
        if near is None:
            return group.is_reachable(place, last) and not (
                self.rules.stores_whole_blocks and any(table[block] == null for block in blocks)
            )
        reachable = [block for block in blocks if any(block in places for places in near)]
        if self.rules.stores_whole_blocks and any(table[block] == null for block in reachable):
            return False
        return bool(reachable)

    def _store_plain(self, request: Request, progress: OffloadProgress, tokens: int) -> Transfer | None:
        """`_store` where there is one group that keeps all tokens."""
        host = self.host
        first = progress.stored[0]
        last = tokens // self.groups[0].size
        sequence = progress.names[0]
        if len(sequence) < last:
            self._lookup.extend(progress, request, tokens)
        new_names = host.reserve(sequence[first:last], sequence, progress.access) if first < last else []
        if new_names is None:
            self._refused.add(request)
            return None
        count = len(new_names)
        if not count:
            self._advance(progress, self.groups[0], tokens, last)
            return None
        if count < len(sequence) or not host.eviction.ignores_writing:
            host.touch(sequence)
        if count < last - first or self.spec.factor > 1:
            transfer = self._copy(request, progress, new_names, [self.memory.blocks(request)], [last])
            progress.stored[0] = last
            return transfer
        # Nothing of its next blocks was stored, as nearly always.
        progress.stored[0] = last
        blocks = self.memory.blocks(request)
        if first or last < len(blocks):
            blocks = blocks[first:last]
        job = self._begin(request, progress, new_names, tuple(blocks), is_store=True)
        return self._transfer(job, host.new_slots)

    def _copy(
        self,
        request: Request,
        progress: OffloadProgress,
        new_names: list[int],
        tables: list[list[int]],
        lasts: list[int],
    ) -> Transfer:
        in_copy = set(new_names)
        blocks: list[int] = []
        places: list[int] = []
        windowed: list[int] = []
        for group, table, last in zip(self.groups, tables, lasts, strict=True):
            number = group.number
            first = progress.stored[number]
            names = progress.names[number][first:last]
            group_blocks, group_places = self._places(names, table, first, in_copy)
            blocks += group_blocks
            places += group_places
            if group.window:
                windowed += group_blocks
        job = self._begin(request, progress, new_names, blocks, is_store=True)
        self._watched.watch(windowed, job.number)
        return self._transfer(job, places)

    def _transfer(self, job: TransferJob, places: Iterable[int]) -> Transfer:
        blocks = tuple(job.blocks)
        self.stored_blocks += len(blocks)
        if self._log.events is not None:
            self._log.add(EventKind.STORING, job.request.id, list(blocks), detail=f"job={job.number}")
        return Transfer(job.number, job.request, blocks, tuple(places))

    def _places(
        self, names: list[int], table: list[int], first: int, in_copy: set[int]
    ) -> tuple[list[int], list[int]]:
        """The device blocks of those offloaded blocks that are in a copy, and their places in the host.

        `names` are of the offloaded blocks from number `first` on, `table` is the request's block table.
        """
        slots = self.host.slots
        factor = self.spec.factor
        null = self.memory.null
        blocks: list[int] = []
        places: list[int] = []
        for place, name in enumerate(names, first):
            if name not in in_copy:
                continue
            slot = slots[name] * factor
            for part in range(factor):
                block = table[place * factor + part]
                if block != null:
                    blocks.append(block)
                    places.append(slot + part)
        return blocks, places

    def take_flushed(self) -> tuple[int, ...]:
        """The stores that must be done before the next step computes anything."""
        return self._watched.take_due()

    # ---- requests go

    def preempted(self, request: Request) -> None:
        """A request loses its blocks: its stores must be done before they are written to."""
        progress = self._progress.get(request)
        if progress is not None:
            self._watched.require(progress.jobs)
            self._refused.discard(request)
            self._note_tables(request, progress)

    def _note_tables(self, request: Request, progress: OffloadProgress) -> None:
        """Keeps the numbers of a running request's blocks, which it is about to give back."""
        if self.rules.stores_endings and not self._lookup.windows and self.memory.holds(request):
            progress.tables = [list(self.memory.blocks(request, group.number)) for group in self.groups]

    def ended(self, request: Request, computed: int | None = None) -> bool:
        """A request has ended, and is about to give its blocks back. False: it keeps them for a load.

        `computed`: tokens that plans computed, where it did not come to its end by itself.
        """
        progress = self._progress.get(request)
        if progress is None:
            return True
        if self._arrived:
            self._arrived.discard(request)
        if self._failed:
            self._failed.discard(request)
        if self._refused:
            self._refused.discard(request)
        if self.holders:
            self.holders.pop(request, None)
        if self.rules.stores_endings:
            if request.state is not State.LOADING:
                self._note_tables(request, progress)
            hit_ends = () if self._hit_ends is None else self._hit_ends(request)
            self._endings[request] = Ending(self._left_to_store(request, computed), hit_ends)
        elif not progress.jobs:
            del self._progress[request]
            return True
        for number in progress.jobs:
            job = self.jobs[number]
            if job.is_store:
                self._watched.watch(job.blocks, number)
        self._watched.watch_until_done(noting=self.rules.stores_endings)
        if request in self.loading:
            self._abandoned.add(request)
            return False
        return True

    def _left_to_store(self, request: Request, computed: int | None) -> int:
        """Up to which token blocks of a request that has ended may be stored."""
        tokens = request.prompt_tokens + request.output_tokens
        if computed is not None and self.rules.stores_computed:
            tokens = min(computed, tokens)
        elif self.rules.leaves_last_token:
            tokens = max(request.prompt_tokens, tokens - 1)
        return min(tokens, request.prompt_tokens) if self.spec.policy.offload_prompt_only else tokens

    def keep(self, step: int, give_back: Callable[[], None]) -> None:
        """Keeps blocks until a step has been executed, the newest in flight."""
        self.deferred_frees.append((step, give_back))

    def give_back_kept(self, step: int) -> bool:
        """Gives back what was kept until this step. False: there was nothing."""
        deferred = self.deferred_frees
        if not deferred or deferred[0][0] > step:
            return False
        while deferred and deferred[0][0] <= step:
            deferred.popleft()[1]()
        return True

    # ---- transfers end

    def fail_loads(self, lost: Sequence[int]) -> list[Request]:
        """The requests that end because their load is among those that failed, each with its reason.

        A store that failed is no store. With `kv_load_failure_policy` `recompute` nobody ends: the tokens of
        the load are computed.
        """
        if not lost or self.spec.policy.kv_load_failure_policy != "fail":
            return []
        requests = [request for number in lost if (request := self.loader(number)) is not None]
        for request in requests:
            request.reason = "a load from host memory failed"
        return requests

    def loader(self, number: int) -> Request | None:
        """The live request that a job under way loads for; None where it is a store, or nobody waits."""
        job = self.jobs.get(number)
        if job is None or job.is_store or job.request not in self.loading or not job.request.alive:
            return None
        return job.request

    def transferred(self, numbers: Iterable[int], lost: Sequence[int] = ()) -> None:
        """Takes note that transfers have ended, in this order; `lost`: those of them that failed."""
        self._room_made = True
        for number in numbers:
            job = self.jobs.pop(number, None)
            if job is not None:
                self._finish(job, failed=number in lost)
        self._watched.relax(noting=bool(self._endings))
        self._tell_changes()
        if self._lookup.names.many:
            self._lookup.names.sweep(self._names_in_use())

    def _names_in_use(self) -> Iterator[Iterable[int]]:
        """Every name that somebody keeps. Those of transfers are among these."""
        yield from self.host.names()
        for progress in self._progress.values():
            yield from progress.names

    def _finish(self, job: TransferJob, *, failed: bool) -> None:
        request = job.request
        progress = self._progress[request]
        progress.jobs.remove(job.number)
        if job.is_store:
            self.host.written(job.names, failed=failed)
            if failed:
                progress.stored = [0] * len(self.groups)
            if self._watched.stores:
                self._watched.end_store(job.number, job.blocks)
            if self._log.events is not None:
                self._log.add(EventKind.OFFLOADED, request.id, detail=f"job={job.number}")
        else:
            self.host.unpin(job.names)
            self._lookup.being_loaded.difference_update(job.names)
            del self.loading[request]
            self.lost_loads += failed
            if request in self._abandoned:
                self._abandoned.remove(request)
                self.memory.release(request)
            else:
                self._arrived.add(request)
                if failed:
                    self._failed.add(request)
                    request.computed_tokens = progress.local
            if self._log.events is not None:
                self._log.add(EventKind.LOADED, request.id, detail=f"job={job.number}")
        # vLLM 0.26 forgets it here even where the next plan would store what it left.
        stored_first = self.rules.stores_endings and self.rules.forgets_with_plan
        if not progress.jobs and (progress.ended if stored_first else not request.alive):
            self._endings.pop(request, None)
            del self._progress[request]

    def _tell_changes(self) -> None:
        """Hands the changes of the host's content on as KV events, where these are kept."""
        kv = self._log.kv
        if kv is None or not self.host.changes:
            return
        changes, self.host.changes = self.host.changes, []
        for names, added in changes:
            keys = [self._lookup.names.block_key(name) for name in names]
            if added:
                for key, group in keys:
                    kv.offloaded(key, group)
            else:
                kv.left_host(keys)
