"""Prefill and decode apart: one replica computes the prompt, another one generates.

    client -> router -> decode replica D chosen, then prefill replica P (llm-d's order)
    P computes the prompt and its first token; its blocks are held until they have been read
    D reserves blocks for the whole prompt, or waits until it has room
    the link carries what D lacks (or the whole prompt), one transfer at a time per replica
    D has the prompt cached, computes what is left of its last block, and generates

D and P look at handoffs between their steps only: when D reserves, when it takes what was transferred, and
when P's blocks come free. As with vLLM's pull and Dynamo's default. A request that lacks few tokens at D
stays there (conditional disaggregation). Between its arrival at D and its admission the transferred blocks
are cached, not held.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import simpy
from pagecast.sim.core import handoff as blocks
from pagecast.sim.core.request import Request, State
from pagecast.sim.fleet.choices import Choices
from pagecast.sim.fleet.fleet import Fleet, call_at
from pagecast.sim.fleet.handoff import Handoff, HandoffFeed, Ports, Tasks
from pagecast.sim.fleet.inbox import HandoffInbox
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.router import Router
from pagecast.sim.fleet.settings import Disaggregation
from pagecast.sim.fleet.view import View
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.metrics import prefix_lookup_s, statistics
from pagecast.sim.replica.arrivals import NS
from pagecast.traces.arrays import Flags, Floats

# What a prompt's computation found, by the names of request and table.
_FOUND = ("cached_tokens", "reused_tokens", "partial_tokens", "external_tokens", "disk_tokens")


class DisaggregatedFleet(Fleet):
    """A fleet whose replicas prefill or decode: `router` chooses the first, `decode_router` the second."""

    def __init__(
        self,
        env: simpy.Environment,
        clients: Arrivals,
        prompts: Prompts,
        router: Router,
        decode_router: Router,
        settings: Disaggregation,
        **more: Any,
    ) -> None:
        super().__init__(env, clients, prompts, router, **more)
        self.decode_router = decode_router
        self.settings = settings
        self.decode_choices = Choices()
        self.prefill_ready: list[View] = []
        self.handoffs: dict[int, Handoff[Member]] = {}
        self.local: dict[int, Member] = {}  # the decode replica of each row that is computed there alone
        self.ports = Ports(settings.bytes_per_s, round(settings.latency_s * NS))
        self._tasks: defaultdict[int, Tasks[Member]] = defaultdict(Tasks)  # by replica

    @property
    def routers(self) -> list[Choices]:
        """What each of the two routers chose."""
        return [self.choices, self.decode_choices]

    def add(self, member: Member, view: View, ready_ns: int | None = None) -> None:
        """A replica of either role."""
        _inbox(member).on_turn = partial(self._turn, member)
        if member.role == "prefill":
            self.members.append(member)
            self.views[member.number] = view
            self.prefill_ready.append(view)
            self._log_event(member, "ready")
        else:
            super().add(member, view, ready_ns)

    def route(self, row: int, now: int, arrival_ns: int) -> None:
        """Chooses who decodes, and who prefills unless the decode replica lacks few of the tokens."""
        self._arrival_ns[row] = arrival_ns
        query = Query(self.prompts, row, now, arrival_ns)
        decode, cached = self.decode_router.choose(query, self.ready)
        decode.add(row, query.prompt_tokens)
        self.decode_router.on_dispatch(query, decode)
        self.decode_choices.add(row, decode, self.ready)
        target = self.members[decode.number]
        if query.prompt_tokens - cached < self.settings.remote_tokens:
            self.local[row] = target
            self._send(row, target, cached, now, arrival_ns)
            return
        prefill, cached = self.router.choose(query, self.prefill_ready)
        prefill.add(row, query.prompt_tokens)
        self.router.on_dispatch(query, prefill)
        self.choices.add(row, prefill, self.prefill_ready)
        source = self.members[prefill.number]
        self.handoffs[row] = Handoff(row, source, target)
        _feed(source).one_token.add(row)
        self._send(row, source, cached, now, arrival_ns)

    def _send(self, row: int, member: Member, believed_tokens: int, now: int, arrival_ns: int) -> None:
        self.believed_tokens[row] = believed_tokens
        self.place[row] = member
        self._deliver(member, row, now, arrival_ns)

    def on_end(self, number: int, row: int, now: int) -> None:
        """A request has ended on a replica, or only its prompt has."""
        handoff = self.handoffs.get(row)
        view = self.views[number]
        view.remove(row)
        if handoff is not None and not handoff.is_decoding:
            self.router.on_end(row, view, now, 1)
            self._end_prefill(handoff, now)
            return
        self.decode_router.on_end(row, view, now, self.prompts.output_tokens[row])
        self._close(row, now)
        if self._tasks[number].waiting:  # for the blocks that are free now
            _inbox(self.members[number]).ring(now)

    def _end_prefill(self, handoff: Handoff[Member], now: int) -> None:
        """Holds a prompt's blocks and tells the decode replica; a prompt that was not computed ends here."""
        row = handoff.row
        request = _feed(handoff.prefill).requests[row]
        if request.state is not State.FINISHED:
            self.views[handoff.decode.number].remove(row)
            del self.handoffs[row]
            self._close(row, now)
            return
        handoff.ready_ns = now
        handoff.source_holder = self._holder(handoff.prefill, row)
        blocks.hold(handoff.prefill.scheduler, handoff.source_holder)
        if self.settings.first_token == "prefill":
            _feed(handoff.decode).first_tokens[row] = request.first_token_ns
            handoff.gave_first_token = True
        del self.place[row]
        call_at(self.env, now, partial(self._offer, handoff))

    def _close(self, row: int, now: int) -> None:
        self.place.pop(row, None)
        self._remaining -= 1
        self.clients.ended(row, now)
        self._schedule_clients()

    # ---- figures

    def ends(self, rows: pd.DataFrame, names: npt.NDArray[np.str_]) -> Flags:
        """Which of the recorded rows end a request, and not its prefill alone. `names`: their replicas.

        Sets the cached tokens of those that end a request to those found where its prompt was computed, and
        the admission to the one there where the first token is from there.
        """
        ends = np.ones(len(rows), dtype=np.bool_)
        admitted_ns = rows["admitted_ns"].to_numpy(copy=True)
        found = {name: rows[name].to_numpy(copy=True) for name in _FOUND}
        for at_row, (row, name) in enumerate(zip(rows["row"].tolist(), names.tolist(), strict=True)):
            handoff = self.handoffs.get(row)
            if handoff is None or not name:
                continue
            if name == handoff.prefill.name:
                ends[at_row] = False
            else:
                prefilled = _feed(handoff.prefill).requests[row]
                for column, tokens in found.items():
                    tokens[at_row] = getattr(prefilled, column)
                if handoff.gave_first_token:
                    admitted_ns[at_row] = prefilled.admitted_ns
        for column, tokens in found.items():
            rows[column] = tokens
        rows["admitted_ns"] = admitted_ns
        return ends

    def take_lookups(self, rows: pd.DataFrame, names: npt.NDArray[np.str_], lookup_s: Floats) -> None:
        """Sets the seconds of the prefix lookup to the prefill replica's where that gave the first token.

        `rows`: recorded rows that end a request, as `ends` left them. `names`: their replicas.
        """
        places: defaultdict[int, list[int]] = defaultdict(list)  # by prefill replica
        for at_row, (row, name) in enumerate(zip(rows["row"].tolist(), names.tolist(), strict=True)):
            handoff = self.handoffs.get(row)
            if handoff is not None and name and handoff.gave_first_token:
                places[handoff.prefill.number].append(at_row)
        for number, at_rows in places.items():
            lookup_s[at_rows] = prefix_lookup_s(rows.iloc[at_rows], self.members[number].costs)

    def figures(self) -> dict[str, Any]:
        """Requests handed over and not, what was carried, and how long handoffs waited and took.

        Requests that the decode replica rejected count as neither; what was carried for them counts.
        """
        landed = [handoff for handoff in self.handoffs.values() if handoff.is_decoding]
        complete = [handoff for handoff in landed if not _is_rejected(handoff.decode, handoff.row)]
        waits = [(handoff.start_ns - handoff.ready_ns) / NS for handoff in complete]
        durations = [(handoff.end_ns - handoff.start_ns) / NS for handoff in complete]
        landings = [(handoff.landed_ns - handoff.end_ns) / NS for handoff in complete]
        return {
            "remote": len(complete),
            "local": sum(not _is_rejected(member, row) for row, member in self.local.items()),
            "moved_bytes": sum(handoff.moved_bytes for handoff in landed),
            "wait_s": statistics(np.array(waits)),
            "transfer_s": statistics(np.array(durations)),
            "landing_s": statistics(np.array(landings)),
        }

    # ---- handing over
    #
    # Events (`_offer`, `_finish_transfer`, `_release`) leave a task and ring; `_turn` does the tasks when the
    # replica is between steps. Its time may be ahead of the environment's.

    def _offer(self, handoff: Handoff[Member]) -> None:
        """The prompt is computed: the decode replica is to reserve blocks."""
        self._tasks[handoff.decode.number].waiting.append(handoff)
        self._ring(handoff.decode)

    def _finish_transfer(self, handoff: Handoff[Member]) -> None:
        """The transfer has ended: the decode replica is to take the prompt."""
        self._tasks[handoff.decode.number].landing.append(handoff)
        self._ring(handoff.decode)

    def _release(self, handoff: Handoff[Member]) -> None:
        """The blocks have been read, or will not be: the prefill replica is to free them."""
        self._tasks[handoff.prefill.number].read.append(handoff)
        self._ring(handoff.prefill)

    def _ring(self, member: Member) -> None:
        now = int(self.env.now)
        _inbox(member).ring(now)
        member.replica.wake(now)

    def _turn(self, member: Member, now: int) -> None:
        """Does the tasks of a replica that is between two steps at `now`."""
        tasks = self._tasks[member.number]
        while tasks.read:
            self._give_back(tasks.read.popleft())
        while tasks.landing:
            self._land(tasks.landing.popleft(), now)
        waiting = tasks.waiting
        while waiting:
            if waiting[0].is_cancelled:
                self._drop(waiting.popleft(), now)
            elif self._reserve(waiting[0], now):
                waiting.popleft()
            else:
                break

    def _give_back(self, handoff: Handoff[Member]) -> None:
        assert handoff.source_holder is not None
        blocks.give_back(handoff.prefill.scheduler, handoff.source_holder)
        handoff.source_holder = None

    def _land(self, handoff: Handoff[Member], now: int) -> None:
        """The decode replica has the prompt cached, and queues the request."""
        handoff.landed_ns = now
        if handoff.target_holder is not None:
            blocks.land(handoff.decode.scheduler, handoff.target_holder)
            handoff.target_holder = None
        if handoff.is_cancelled:
            self._drop(handoff, now)
            return
        call_at(self.env, now, partial(self._release, handoff))
        handoff.is_decoding = True
        self.place[handoff.row] = handoff.decode
        handoff.decode.inbox.put(handoff.row, now, self._arrival_ns[handoff.row])

    def _drop(self, handoff: Handoff[Member], now: int) -> None:
        """Ends a request whose client gave up between prefill and decode."""
        call_at(self.env, now, partial(self._release, handoff))
        self.views[handoff.decode.number].remove(handoff.row)
        self._end_unserved(handoff.row, now, State.CANCELLED, "")

    def _reserve(self, handoff: Handoff[Member], now: int) -> bool:
        """Reserves blocks and starts the transfer. False: there is no room yet."""
        member = handoff.decode
        holder = self._holder(member, handoff.row)
        hit = blocks.reserve(member.scheduler, holder)
        if hit is not None:
            handoff.target_holder = holder
            known = hit.tokens if self.settings.transfer == "missing" else 0
            self._start_transfer(handoff, holder.prompt_tokens - known, now)
            return True
        if member.scheduler.memory.used_blocks:
            return False
        # The prompt never fits: the replica gets it as it is, and rejects it with the reason.
        handoff.start_ns = handoff.end_ns = now
        self._land(handoff, now)
        return True

    def _holder(self, member: Member, row: int) -> Request:
        """A request that holds a prompt's blocks on a replica while they are carried."""
        return self.prompts.feed(member.limits.block_size).request(row, self._arrival_ns[row])

    def _start_transfer(self, handoff: Handoff[Member], tokens: int, now: int) -> None:
        scenario = handoff.decode.scenario
        parallel = scenario.tensor_parallel_size
        each = scenario.facts().kv_bytes_of_sequence(tokens, scenario.kv_cache_dtype, parallel)
        handoff.moved_bytes = round(each * parallel)
        asked_ns = max(now, handoff.decode.replica.device_free_ns) if self.settings.after_step else now
        source, target = handoff.prefill.number, handoff.decode.number
        handoff.start_ns, handoff.end_ns = self.ports.carry(source, target, handoff.moved_bytes, asked_ns)
        call_at(self.env, handoff.end_ns, partial(self._finish_transfer, handoff))

    def _cancel(self, row: int, now: int) -> None:
        handoff = self.handoffs.get(row)
        if handoff is not None and row not in self.place:
            handoff.is_cancelled = True
        else:
            super()._cancel(row, now)


def _feed(member: Member) -> HandoffFeed:
    feed = member.feed
    assert isinstance(feed, HandoffFeed)
    return feed


def _is_rejected(member: Member, row: int) -> bool:
    """Whether a replica has rejected a request."""
    request = _feed(member).requests.get(row)
    return request is not None and request.state is State.REJECTED


def _inbox(member: Member) -> HandoffInbox:
    inbox = member.inbox
    assert isinstance(inbox, HandoffInbox)
    return inbox
