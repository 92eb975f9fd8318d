"""KV events over ZeroMQ, in vLLM's format: which blocks a replica has stored and removed.

Indexes of routers (llm-d's, Dynamo's) subscribe to them. A message has three parts: topic, sequence number
(8 bytes, big endian) and a batch in MessagePack: `[ts, [event, ...], data parallel rank]`. Events are maps
with a `type`: `BlockStored` names blocks by the low 64 bits of their key, with the name of the block before
them and their token ids; `BlockRemoved` names what was evicted. A subscriber that missed messages asks a
second endpoint for those from a sequence number on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import zmq
from pagecast.planner_app.server.generation import Generation
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.events import Event, EventKind
from pagecast.sim.core.plan import Outcome, StepPlan
from pagecast.sim.core.request import Request
from pagecast.sim.runs.transfers import RecordedTransfer

_MEDIUM = "GPU"
_KEPT_BATCHES = 10_000
_MOST_QUEUED = 100_000
_LEAVES = (EventKind.PREEMPTED, EventKind.FINISHED, EventKind.CANCELLED)
_END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Sends batches of events to all subscribers, and again to those who ask. `rank`: of the replica.

    `endpoint` binds where it names all addresses (`tcp://*:5557`), `ipc://` or `inproc://`, and connects
    otherwise, as vLLM does. Errors: BadInput for an endpoint that can't be used.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, topic: str = "", rank: int = 0
    ) -> None:
        self._topic = topic.encode()
        self._rank = rank
        self._sequence = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_BATCHES)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._out = self._socket(zmq.PUB, endpoint, bind=_binds(endpoint))
        self._again = self._socket(zmq.ROUTER, replay_endpoint, bind=True) if replay_endpoint else None

    def _socket(self, kind: int, endpoint: str, *, bind: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.set_hwm(_MOST_QUEUED)
        try:
            socket.bind(endpoint) if bind else socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise BadInput(f"KV events: {endpoint}: can't be used ({error})") from None
        return socket

    def send(self, events: list[dict[str, Any]]) -> None:
        """Sends one batch."""
        payload = msgpack.packb([time.time(), events, self._rank])
        self._out.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._recent.append((self._sequence, payload))
        self._sequence += 1

    def answer(self) -> None:
        """Takes in subscriptions, and sends batches again to those who asked since the last call."""
        self._out.getsockopt(zmq.EVENTS)  # a publisher learns of subscribers only when it is asked something
        if self._again is None:
            return
        while self._again.poll(0):
            frames = self._again.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            with suppress(zmq.ZMQError):
                for sequence, payload in self._recent:
                    if sequence >= first:
                        self._again.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
                self._again.send_multipart((client, b"", _END, b""))

    def close(self) -> None:
        """Closes the sockets."""
        for socket in self._sockets:
            socket.close(linger=0)


def _binds(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class KvEvents:
    """Implements `Keeper`: turns the scheduler's log into KV events, a batch for each step.

    The log's blocks are numbers; here each gets its content's name, and equal content is told once: a block
    is stored when the first of its copies is, and removed with the last. `log` gives the scheduler's events
    so far, which are taken from it. `most`: events in one message (None: all those of a step).
    """

    def __init__(
        self, log: Callable[[], list[Event] | None], publisher: Publisher, most: int | None = None
    ) -> None:
        self._log = log
        self._most = most
        self._publisher = publisher
        self._live: dict[str, tuple[Request, Generation]] = {}
        self._tables: dict[str, list[int]] = {}  # block tables as the log has them so far
        self._name_of: dict[int, int] = {}  # of each block with content that was told
        self._copies: dict[int, int] = {}  # blocks of each name

    def submitted(self, request: Request, generation: Generation, at_ns: int) -> None:
        self._live[request.id] = (request, generation)

    def idle(self, at_ns: int) -> None:
        pass

    def verified(self, plan: StepPlan, outcome: Outcome) -> None:
        """Events are published when the step ends."""

    def transferred(self, transfers: list[RecordedTransfer]) -> None:
        pass

    def committed(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        self.publish()

    def ended(self, request: Request, generation: Generation, at_ns: int) -> None:
        self.publish()
        self._live.pop(request.id, None)

    def publish(self) -> None:
        """Sends what the log has and empties it."""
        log = self._log()
        if not log:
            return
        batch: list[dict[str, Any]] = []
        for event in log:
            kind = event.kind
            if kind is EventKind.STORED:
                self._stored(event, batch)
            elif kind is EventKind.EVICTED:
                self._removed(event, batch)
            elif kind is EventKind.ALLOCATED or kind is EventKind.REUSED:
                if kind is EventKind.ALLOCATED:
                    self._removed(event, batch)  # content that was taken back and never evicted
                self._tables.setdefault(event.request, []).extend(event.blocks)
            elif kind in _LEAVES:
                self._tables.pop(event.request, None)
        log.clear()
        most = self._most or max(len(batch), 1)
        for start in range(0, len(batch), most):
            self._publisher.send(batch[start : start + most])

    def flush(self) -> None:
        """Answers subscribers that missed messages."""
        self._publisher.answer()

    def close(self) -> None:
        """Tells subscribers that nothing is cached any more, and closes the sockets."""
        self._publisher.send([{"type": "AllBlocksCleared"}])
        self._publisher.close()

    def _stored(self, event: Event, batch: list[dict[str, Any]]) -> None:
        request, generation = self._live[event.request]
        place = {block: number for number, block in enumerate(self._tables.get(event.request, ()))}
        size = request.keys.block_size
        for block in event.blocks:
            number = place.get(block)
            if number is None:
                continue
            name = _name(request, number)
            self._name_of[block] = name
            copies = self._copies[name] = self._copies.get(name, 0) + 1
            if copies > 1:
                continue
            before = _name(request, number - 1) if number else None
            ids = _tokens(generation, number * size, size)
            last = batch[-1] if batch else None
            if last is not None and last["type"] == "BlockStored" and last["block_hashes"][-1] == before:
                last["block_hashes"].append(name)
                last["token_ids"].extend(ids)
                continue
            batch.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [name],
                    "parent_block_hash": before,
                    "token_ids": ids,
                    "block_size": size,
                    "lora_id": None,
                    "medium": _MEDIUM,
                    "lora_name": generation.adapter or None,
                }
            )

    def _removed(self, event: Event, batch: list[dict[str, Any]]) -> None:
        names = []
        for block in event.blocks:
            name = self._name_of.pop(block, None)
            if name is None:
                continue
            self._copies[name] -= 1
            if not self._copies[name]:
                del self._copies[name]
                names.append(name)
        if names:
            batch.append({"type": "BlockRemoved", "block_hashes": names, "medium": _MEDIUM})


def _name(request: Request, number: int) -> int:
    return int.from_bytes(request.keys.digests[number][:8], "little")


def _tokens(generation: Generation, start: int, count: int) -> list[int]:
    """Token ids of a block, of the prompt or beyond it."""
    prompt = len(generation.prompt)
    if start + count <= prompt:
        return list(generation.prompt[start : start + count])
    return [
        *generation.prompt[start:prompt],
        *generation.tokens[max(start - prompt, 0) : start + count - prompt],
    ]
