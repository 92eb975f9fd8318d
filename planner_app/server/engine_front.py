"""The server in front of an engine, in a process of its own. Importing this does not import torch."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from pagecast.planner_app.server.app import ReplicaServer
from pagecast.planner_app.server.engine_backend import EngineBackend
from pagecast.planner_app.server.engine_mail import EngineFacts
from pagecast.planner_app.server.intake import RequestIntake
from pagecast.planner_app.server.metrics import ServerMetrics
from pagecast.planner_app.server.options import ServeOptions
from pagecast.planner_app.server.running import StopSignals, announce, check_recorded, serve
from pagecast.planner_app.server.tokenizer import NumberTokenizer, PackedTokenizer, Tokenizer, tokenizer_for
from pagecast.planner_app.stderr import complain
from pagecast.sim.core.errors import CannotRunHere

if TYPE_CHECKING:
    from pagecast.planner_app.server.engine_work import EngineWork

_NO_LOGPROBS = -1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def front_replica(
    facts: EngineFacts,
    options: ServeOptions,
    connection: socket.socket,
) -> ReplicaServer:
    """The server of an engine at the other end of `connection`. Errors: BadInput."""
    text_tokenizer: Tokenizer = tokenizer_for(options.model, options.tokenizer)
    if isinstance(text_tokenizer, PackedTokenizer):
        text_tokenizer = NumberTokenizer(facts.vocabulary)
    backend = EngineBackend(facts, connection, text_tokenizer)
    metrics = ServerMetrics(backend, options.names[0], cache_config=facts.cache_config)
    backend.observer = metrics
    intake = RequestIntake(
        text_tokenizer,
        options.names,
        {},
        backend.max_model_len,
        vocabulary=facts.vocabulary,
        most_logprobs=_NO_LOGPROBS,
        forms=False,
    )
    return ReplicaServer(backend, intake, metrics, options)


def serve_engine(
    work: EngineWork,
    facts: EngineFacts,
    connection: socket.socket,
    options: ServeOptions,
    sockets: Sequence[socket.socket],
) -> None:
    """Runs an engine's work here, and the server in front of it in another process, until a signal comes.

    Errors: CannotRunHere where either failed.
    """
    server = get_context("spawn").Process(
        target=_front, args=(facts, options, connection, list(sockets)), name="pagecast server"
    )
    signals, ended_at_once = StopSignals(), False

    def stop(*_: object) -> None:
        nonlocal ended_at_once
        if signals.insists():
            ended_at_once = True
            server.kill()
        elif signals.is_first():
            work.drain()

    before = [signal.signal(name, stop) for name in _SIGNALS]
    try:
        _start_deaf(server)
        for one in (connection, *sockets):
            one.close()
        work.run()
        server.join()
    finally:
        for name, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(name, handler)
        if server.is_alive():
            server.kill()
    if ended_at_once:
        raise CannotRunHere("a second signal has ended the server; requests under way were dropped")
    if server.exitcode is not None and server.exitcode < 0:
        ended_by = signal.Signals(-server.exitcode).name
        raise CannotRunHere(f"the server's process was ended by {ended_by}; requests under way were dropped")
    if work.failed is not None or server.exitcode:
        raise CannotRunHere("the server has failed; see the messages above")
    check_recorded(work.history.failed, options)


def _start_deaf(server: BaseProcess) -> None:
    """Starts a process that hears none of the signals, from its first instruction on: it inherits the mask.

    Signals to this process wait meanwhile.
    """
    resource_tracker.ensure_running()  # which unblocks these signals where it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        server.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _front(
    facts: EngineFacts,
    options: ServeOptions,
    connection: socket.socket,
    sockets: list[socket.socket],
) -> None:
    """The process of the server: the engine's process hears the signals, and says when to end.

    A signal to the whole process group comes here too, and must not cut answers short.
    """
    for name in _SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    try:
        replica = front_replica(facts, options, connection)
        backend = replica.backend
        assert isinstance(backend, EngineBackend)

        def drain_by(stop: Callable[[], None]) -> None:
            backend.drain = stop

        serve([replica], sockets, lambda ports: announce(options, ports), drain_by)
    except CannotRunHere as error:
        with suppress(OSError):
            complain(str(error))
        sys.exit(1)
