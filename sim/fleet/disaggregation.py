"""Prefill and decode apart: one replica computes the prompt, another one generates.

    client -> router -> decode replica D chosen, then prefill replica P (llm-d's order)
    P computes the prompt and its first token; its blocks are held until they have been read
    D reserves blocks for the whole prompt, or waits until it has room
    the link carries what D lacks (or the whole prompt), one transfer at a time per replica
    D has the prompt cached, computes what is left of its last block, and generates

As with vLLM's pull and Dynamo's default. A request that lacks few tokens at D stays there (conditional
disaggregation). Between its arrival at D and its admission the transferred blocks are cached, not held.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import simpy
from pagecast.sim.core import handoff as blocks
from pagecast.sim.core.request import Request, State
from pagecast.sim.fleet.fleet import Fleet, call_at
from pagecast.sim.fleet.handoff import Handoff, HandoffFeed, Ports
from pagecast.sim.fleet.member import Member
from pagecast.sim.fleet.query import Prompts, Query
from pagecast.sim.fleet.routers.router import Router
from pagecast.sim.fleet.settings import Disaggregation
from pagecast.sim.fleet.view import View
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.replay.clients import NS, Arrivals
from pagecast.sim.replay.metrics import statistics


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
        self.prefill_ready: list[View] = []
        self.handoffs: dict[int, Handoff[Member]] = {}
        self.local_requests = 0
        self.ports = Ports(settings.bytes_per_s, round(settings.latency_s * NS))
        self._queues: dict[int, deque[Handoff[Member]]] = {}  # handoffs that wait for room, by decode replica

    def add(self, member: Member, view: View, ready_ns: int | None = None) -> None:
        """A replica of either role."""
        if member.role == "prefill":
            self.members.append(member)
            self.views[member.number] = view
            self.prefill_ready.append(view)
            self._log_event(member, "ready")
        else:
            super().add(member, view, ready_ns)

    def route(self, row: int, now: int, arrival_ns: int) -> None:
        """Chooses who decodes, then who prefills unless the prompt is as good as there."""
        self._arrival_ns[row] = arrival_ns
        query = Query(self.prompts, row, now)
        decode, cached = self.decode_router.choose(query, self.ready)
        decode.add(row, query.prompt_tokens)
        self.decode_router.on_dispatch(query, decode)
        target = self.members[decode.number]
        if query.prompt_tokens - cached < self.settings.remote_tokens:
            self.local_requests += 1
            self.believed_tokens[row] = cached
            self.choices.append(decode.number)
            self.place[row] = target
            self._deliver(target, row, now, arrival_ns)
            return
        prefill, self.believed_tokens[row] = self.router.choose(query, self.prefill_ready)
        prefill.add(row, query.prompt_tokens)
        self.router.on_dispatch(query, prefill)
        self.choices.append(prefill.number)
        source = self.place[row] = self.members[prefill.number]
        self.handoffs[row] = Handoff(row, source, target)
        _feed(source).one_token.add(row)
        self._deliver(source, row, now, arrival_ns)

    def on_end(self, number: int, row: int, now: int) -> None:
        """A request has ended on a replica: its prefill, or all of it."""
        handoff = self.handoffs.get(row)
        output = self.prompts.output_tokens[row]
        view = self.views[number]
        view.remove(row)
        if handoff is None or handoff.is_decoding:
            self.decode_router.on_end(row, view, now, output)
            self._close(row, now)
            call_at(self.env, now, partial(self._start_transfers, self.members[number]))
            return
        self.router.on_end(row, view, now, 1)
        request = _feed(handoff.prefill).requests[row]
        if request.state is not State.FINISHED:
            self.views[handoff.decode.number].remove(row)
            del self.handoffs[row]
            self._close(row, now)
            return
        handoff.ready_ns = now
        handoff.source_holder = self._hold(handoff.prefill, row)
        if self.settings.first_token == "prefill":
            _feed(handoff.decode).first_tokens[row] = request.first_token_ns
        del self.place[row]
        call_at(self.env, now, partial(self._offer, handoff))

    def _close(self, row: int, now: int) -> None:
        self.place.pop(row, None)
        self._remaining -= 1
        self.clients.ended(row, now)
        self._schedule_clients()

    def _hold(self, member: Member, row: int) -> Request:
        """Holds the blocks of a prompt that has just been computed, until they have been read."""
        holder = self.prompts.feed(member.limits.block_size).request(row, 0)
        blocks.hold(member.scheduler, holder)
        return holder

    # ---- figures

    def settle(self, rows: pd.DataFrame, names: npt.NDArray[np.str_]) -> npt.NDArray[np.bool_]:
        """Selects the recorded rows that end a request, not its prefill alone.

        The cached tokens of a request are those found where its prompt was computed.
        """
        ends = np.ones(len(rows), dtype=np.bool_)
        cached = rows["cached_tokens"].to_numpy(copy=True)
        reused = rows["reused_tokens"].to_numpy(copy=True)
        for at_row, (row, name) in enumerate(zip(rows["row"].tolist(), names.tolist(), strict=True)):
            handoff = self.handoffs.get(row)
            if handoff is None or not name:
                continue
            if name == handoff.prefill.name:
                ends[at_row] = False
            else:
                prefilled = _feed(handoff.prefill).requests[row]
                cached[at_row], reused[at_row] = prefilled.cached_tokens, prefilled.reused_tokens
        rows["cached_tokens"], rows["reused_tokens"] = cached, reused
        return ends

    def figures(self) -> dict[str, Any]:
        """Requests handed over and not, what was carried, and how long handoffs waited and took."""
        complete = [handoff for handoff in self.handoffs.values() if handoff.is_decoding]
        waits = [(handoff.start_ns - handoff.ready_ns) / NS for handoff in complete]
        durations = [(handoff.end_ns - handoff.start_ns) / NS for handoff in complete]
        return {
            "remote": len(complete),
            "local": self.local_requests,
            "moved_bytes": sum(handoff.moved_bytes for handoff in complete),
            "wait_s": statistics(np.array(waits)),
            "transfer_s": statistics(np.array(durations)),
        }

    # ---- handing over

    def _offer(self, handoff: Handoff[Member]) -> None:
        """Reserves blocks at the decode replica and starts the transfer, or waits for room."""
        self._queues.setdefault(handoff.decode.number, deque()).append(handoff)
        self._start_transfers(handoff.decode)

    def _start_transfers(self, member: Member) -> None:
        """Starts the transfers that a decode replica has room for, in order."""
        queue = self._queues.get(member.number)
        while queue:
            handoff = queue[0]
            if handoff.is_cancelled:
                queue.popleft()
                self._drop(handoff)
                continue
            now = int(self.env.now)
            member.replica.cut(now)
            holder = self.prompts.feed(member.limits.block_size).request(handoff.row, 0)
            hit = blocks.reserve(member.scheduler, holder)
            if hit is not None:
                handoff.target_holder = holder
            elif member.scheduler.memory.used_blocks:
                return
            # A prompt that never fits goes to the replica as it is, which says so.
            queue.popleft()
            known = hit.tokens if hit is not None and self.settings.transfer == "missing" else 0
            self._start_transfer(handoff, holder.prompt_tokens - known, now)

    def _start_transfer(self, handoff: Handoff[Member], tokens: int, now: int) -> None:
        scenario = handoff.decode.scenario
        parallel = scenario.tensor_parallel_size
        each = find_model(scenario.model).kv_bytes_of_sequence(tokens, scenario.kv_cache_dtype, parallel)
        handoff.moved_bytes = round(each * parallel)
        source, target = handoff.prefill.number, handoff.decode.number
        handoff.start_ns, handoff.end_ns = self.ports.carry(source, target, handoff.moved_bytes, now)
        call_at(self.env, handoff.end_ns, partial(self._finish_transfer, handoff))

    def _finish_transfer(self, handoff: Handoff[Member]) -> None:
        """The prompt is at the decode replica: it joins the queue there."""
        now = int(self.env.now)
        self._give_back(handoff, now)
        if handoff.is_cancelled:
            self._drop(handoff)
            return
        handoff.is_decoding = True
        self.place[handoff.row] = handoff.decode
        handoff.decode.send(handoff.row, now, self._arrival_ns[handoff.row])

    def _give_back(self, handoff: Handoff[Member], now: int) -> None:
        """Frees the blocks read, and makes those written findable."""
        for member, holder in (
            (handoff.prefill, handoff.source_holder),
            (handoff.decode, handoff.target_holder),
        ):
            if holder is None:
                continue
            member.replica.cut(now)
            end = blocks.land if holder is handoff.target_holder else blocks.give_back
            end(member.scheduler, holder)
            member.replica.wake(now)
        handoff.source_holder = handoff.target_holder = None

    def _drop(self, handoff: Handoff[Member]) -> None:
        """Ends a request whose client gave up between prefill and decode."""
        now = int(self.env.now)
        self._give_back(handoff, now)
        self.views[handoff.decode.number].remove(handoff.row)
        self._end_unserved(handoff.row, now, State.CANCELLED, "")

    def _give_up(self, row: int, now: int) -> None:
        handoff = self.handoffs.get(row)
        if handoff is not None and row not in self.place:
            handoff.is_cancelled = True
        else:
            super()._give_up(row, now)


def _feed(member: Member) -> HandoffFeed:
    feed = member.feed
    assert isinstance(feed, HandoffFeed)
    return feed
