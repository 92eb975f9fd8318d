"""Servers of two engines, one of which computes prompts for the other; see `handoff_engines.py`.

router --(row, arrival)--> prefill --(row, arrival, blocks)--> decode --row--> router
                                   <---------- row -----------
"""

from __future__ import annotations

from typing import Any

from live_server import Inlet, LiveServer
from pagecast.engine.engine import Engine
from pagecast.engine.handoff import Arrival, Exporter, Importer, Parcel
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.request import State
from pagecast.sim.replica.arrivals import NS
from pagecast.traces.schema import Trace


class PrefillServer(LiveServer):
    """Computes prompts, and holds their blocks until the decode engine has read them."""

    def __init__(self, engine: Engine, trace: Trace, router: Any, peer: Any) -> None:
        super().__init__(engine, trace)
        self._peer = peer
        self._router = router
        self._exporter = Exporter(engine)
        self._given_back_ns: dict[int, int] = {}
        self._inlet = PrefillInlet(self)
        self._arrivals = self._inlet  # type: ignore[assignment]

    def connect(self) -> None:
        """Lets the decode engine read the KV tensor."""
        self._peer.send(self._exporter.shared())

    def close(self) -> None:
        """The memory is this engine's own."""

    def take_back(self) -> None:
        """Gives back the blocks that have been read since the last call."""
        while self._peer.poll():
            row = self._peer.recv()
            self._given_back_ns[row] = self.engine.loop.clock.now()
            self._exporter.give_back(str(row))

    def columns(self, rows: list[int]) -> dict[str, list[Any]]:
        """When each row's blocks were given back."""
        return {**super().columns(rows), "given_back_s": _seconds(self._given_back_ns, rows)}

    def _ended(self, sequence: Sequence) -> None:
        self._recording.ended(sequence)
        request = sequence.request
        row = request.index
        if request.state is not State.FINISHED:
            self._router.send(row)
            return
        parcel = self._exporter.hold(request)
        self._peer.send((row, self._inlet.sent_ns.pop(row), parcel.blocks))


class PrefillInlet(Inlet):
    """Arrivals from the router; between them it takes back what was read."""

    def __init__(self, server: PrefillServer) -> None:
        super().__init__(server._router, lambda: server.engine.loop.clock)
        self._server = server
        self.sent_ns: dict[int, int] = {}

    def take(self, now: int) -> tuple[int, int | None] | None:
        """The next request that has come."""
        self._server.take_back()
        return super().take(now)

    def _read(self) -> None:
        super()._read()
        self.sent_ns.update(self._entries)


class DecodeServer(LiveServer):
    """Reads the prompts that the prefill engine holds, and generates."""

    def __init__(self, engine: Engine, trace: Trace, router: Any, peer: Any) -> None:
        super().__init__(engine, trace)
        self._peer = peer
        self._inlet = DecodeInlet(self, router, peer)
        self._arrivals = self._inlet  # type: ignore[assignment]

    def connect(self) -> None:
        """Opens the prefill engine's KV tensor."""
        self._inlet.importer = Importer(self.engine, self._peer.recv())

    def close(self) -> None:
        """Lets go of the other engine's memory."""
        self._inlet.importer = None

    def request(self, row: int) -> Any:
        """The request of a row."""
        return self._feed.request(row, 0)

    def columns(self, rows: list[int]) -> dict[str, list[Any]]:
        """When each row's prompt was reserved, copied and landed, and what was copied."""
        read = self._inlet.read
        copies = {row: arrival.copied_ns for row, arrival in read.items() if arrival.copied_ns is not None}
        return {
            **super().columns(rows),
            "offered_s": _seconds({row: one.offered_ns for row, one in read.items()}, rows),
            "reserved_s": _seconds({row: one.reserved_ns for row, one in read.items()}, rows),
            "landed_s": _seconds({row: one.landed_ns for row, one in read.items()}, rows),
            "copy_start_s": _seconds({row: times[0] for row, times in copies.items()}, rows),
            "copy_end_s": _seconds({row: times[1] for row, times in copies.items()}, rows),
            "moved_bytes": [read[row].moved_bytes for row in rows],
        }


class DecodeInlet(Inlet):
    """Requests whose prompts have arrived. The router's pipe only says when to end."""

    def __init__(self, server: DecodeServer, router: Any, peer: Any) -> None:
        super().__init__(router, lambda: server.engine.loop.clock)
        self._server = server
        self._peer = peer
        self._sent_ns: dict[int, int] = {}
        self.importer: Importer | None = None
        self.read: dict[int, Arrival] = {}

    def take(self, now: int) -> tuple[int, int | None] | None:
        """The next request whose prompt is here."""
        importer = self.importer
        assert importer is not None
        while self._peer.poll():
            row, sent_ns, blocks = self._peer.recv()
            self._sent_ns[row] = sent_ns
            importer.offer(self._server.request(row), Parcel(str(row), blocks))
        for arrival in importer.advance():
            row = arrival.request.index
            self.read[row] = arrival
            self._peer.send(row)
            self._entries.append((row, self._sent_ns.pop(row)))
        return super().take(now)


def _seconds(times_ns: dict[int, Any], rows: list[int]) -> list[float | None]:
    times = [times_ns.get(row) for row in rows]
    return [None if time_ns is None else time_ns / NS for time_ns in times]
