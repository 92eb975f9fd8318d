"""Builds the engine's side of a server. Importing this imports torch."""

from __future__ import annotations

import socket

from pagecast.engine.described import described
from pagecast.engine.engine import Engine
from pagecast.planner_app.server.engine_mail import EngineFacts
from pagecast.planner_app.server.engine_work import EngineWork
from pagecast.planner_app.server.kv_events import KvEvents, Publisher
from pagecast.planner_app.server.options import ServeOptions
from pagecast.planner_app.server.recording import JournalKeeper


def engine_work(engine: Engine, options: ServeOptions, connection: socket.socket) -> EngineWork:
    """The engine's side of a server, with what keeps its history. Errors: BadInput."""
    work = EngineWork(engine, connection)
    if options.record is not None:
        meta = {"name": f"{engine.loaded.spec.facts.name} served", **described(engine)}
        work.history.add(JournalKeeper(options.record, meta, segment_bytes=options.record_segment_bytes))
    if options.kv_events_endpoint is not None:
        endpoints = (options.kv_events_endpoint, options.kv_events_replay_endpoint)
        publisher = Publisher(*endpoints, options.topic(0))
        work.history.add(KvEvents(lambda: engine.loop.scheduler.events, publisher, options.event_batch_size))
    return work


def engine_facts(engine: Engine) -> EngineFacts:
    """The facts that the server in front needs of an engine whose `EngineWork` has been made."""
    limits, facts = engine.limits, engine.loaded.spec.facts
    cache_config = {
        "block_size": str(limits.block_size),
        "cache_dtype": str(engine.loaded.kv.dtype).removeprefix("torch."),
        "enable_prefix_caching": str(limits.caching),
        "gpu_memory_utilization": str(engine.options.gpu_memory_utilization),
        "num_gpu_blocks": str(limits.num_blocks),
    }
    return EngineFacts(
        facts.name,
        facts.vocab,
        limits,
        engine.loaded.max_model_len,
        cache_config,
        engine.loop.clock.start_ns,
    )
