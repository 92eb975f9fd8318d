"""Process of replicas behind HTTP, one port each, until a signal ends it.

SIGTERM and SIGINT drain: no new connections, requests under way are finished, for at most `drain_timeout`.
A second signal ends the process at once, if it comes later than `_REPEATED_S`: `timeout` sends each signal
twice, to the process and to its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from pagecast.planner_app import console
from pagecast.planner_app.server.app import ReplicaServer
from pagecast.planner_app.server.options import ServeOptions
from pagecast.planner_app.server.serving import OwnSend
from pagecast.sim.core.errors import BadInput, CannotRunHere

_BACKLOG = 4096
_REPEATED_S = 1.0
_LAST_WORDS_S = 5  # for answers that the end of the drain has cut, to be sent
_GC_THRESHOLD = 20_000  # objects; thousands of streams are many, and few of them are garbage


class StopSignals:
    """Tells the first signal to end, and one that insists, from a repetition of the first."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_first(self) -> bool:
        """Notes a signal; whether it is the first."""
        if self._first_s is not None:
            return False
        self._first_s = time.monotonic()
        return True

    def insists(self) -> bool:
        """Whether a signal that comes now is meant to end the process at once."""
        return self._first_s is not None and time.monotonic() - self._first_s > _REPEATED_S


class HttpServer(uvicorn.Server):
    """A server that leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def listen(options: ServeOptions, count: int) -> list[socket.socket]:
    """Sockets on `count` ports from the first on. Errors: BadInput where one can't be had."""
    sockets: list[socket.socket] = []
    for number in range(count):
        port = options.port + number if options.port else 0
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, port))
        except (OSError, OverflowError) as error:
            for one in (*sockets, listener):
                one.close()
            raise BadInput(
                f"--host {options.host} --port {port}: can't listen there ({error}); give another"
            ) from None
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        sockets.append(listener)
    return sockets


def announce(options: ServeOptions, ports: Sequence[int]) -> None:
    """Prints where replicas are served."""
    for port in ports:
        scheme = "http" if options.ssl_certfile is None else "https"
        text = f"serving {options.names[0]} on {scheme}://{options.host}:{port}"
        console.out.print(text, soft_wrap=True, highlight=False)


def serve(
    replicas: Sequence[ReplicaServer],
    sockets: Sequence[socket.socket],
    ready: Callable[[list[int]], None],
    drain_by: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Serves until a signal comes. `ready` is called with the ports once all of them answer.

    `drain_by` gets the function that finishes requests under way and then ends. By default SIGTERM and SIGINT
    call it. Errors: CannotRunHere where a backend failed.
    """
    collect_rarely()
    runner = asyncio.Runner(loop_factory=_loop_factory())
    with runner:
        runner.run(_serve(replicas, sockets, ready, drain_by or _drain_at_signals))
    if not all(replica.backend.alive for replica in replicas):
        raise CannotRunHere("a replica has failed; see the messages above")
    for replica in replicas:
        check_recorded(replica.backend.unrecorded, replica.options)


def collect_rarely() -> None:
    """Has Python look for garbage seldom, and never in what is there: a look takes a tenth of a second."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)


def check_recorded(failure: str, options: ServeOptions) -> None:
    """Errors: BadInput for a recording that ended before the server."""
    if failure:
        raise BadInput(f"--record {options.record}: {failure}; what was written until then can be read")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it carries about twice the streams."""
    try:
        import uvloop
    except ImportError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def _drain_at_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(hangup, stop)


async def _serve(
    replicas: Sequence[ReplicaServer],
    sockets: Sequence[socket.socket],
    ready: Callable[[list[int]], None],
    drain_by: Callable[[Callable[[], None]], None],
) -> None:
    servers = [http_server(replica) for replica in replicas]
    signals = StopSignals()

    def stop() -> None:
        if signals.insists():
            os._exit(1)
        if not signals.is_first():
            return
        for replica, server in zip(replicas, servers, strict=True):
            replica.draining = True
            server.should_exit = True
            # Before uvicorn would cancel them, which ends each with a traceback.
            asyncio.get_running_loop().call_later(replica.options.drain_timeout, replica.end_all)

    drain_by(stop)
    tasks = [
        asyncio.create_task(server.serve(sockets=[one])) for server, one in zip(servers, sockets, strict=True)
    ]
    while not all(server.started for server in servers):
        if any(task.done() for task in tasks):
            break
        await asyncio.sleep(0.01)
    else:
        ready([one.getsockname()[1] for one in sockets])
    await asyncio.gather(*tasks)


def http_server(replica: ReplicaServer) -> HttpServer:
    """The server of one replica, not yet started."""
    options = replica.options
    config = uvicorn.Config(
        OwnSend(replica.app),
        access_log=False,
        log_level="error",  # a line for each request that is no HTTP would be anybody's to fill a disk with
        limit_concurrency=options.max_connections,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=round(options.drain_timeout) + _LAST_WORDS_S,
        server_header=False,
        ws="none",
        lifespan="on",
        h11_max_incomplete_event_size=1 << 16,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    config.load()
    config.http_protocol_class = _patient(config.http_protocol_class, options.body_timeout)
    return HttpServer(config)


def _patient(base: Any, timeout_s: float) -> type[asyncio.Protocol]:
    """One of uvicorn's HTTP protocols, with an end to connections whose next header does not come."""

    class Patient(base):  # type: ignore[misc]
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            if self._waiting is not None:
                self._waiting.cancel()

        def _look(self) -> None:
            """Waits where the header of a request has not come as a whole; `cycle` is the request's."""
            header_due = self.cycle is None or self.cycle.response_complete
            if header_due and self._waiting is None:
                self._waiting = asyncio.get_running_loop().call_later(timeout_s, self._give_up)
            elif not header_due and self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _give_up(self) -> None:
            self._waiting = None
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Patient
