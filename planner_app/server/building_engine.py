"""Builds a replica that serves the real engine. Importing this imports torch."""

from __future__ import annotations

from pathlib import Path

from pagecast.engine.described import described
from pagecast.engine.engine import Engine
from pagecast.planner_app.server.app import ReplicaServer
from pagecast.planner_app.server.engine_backend import EngineBackend
from pagecast.planner_app.server.intake import RequestIntake
from pagecast.planner_app.server.kv_events import KvEvents, Publisher
from pagecast.planner_app.server.metrics import ServerMetrics
from pagecast.planner_app.server.options import ServerOptions
from pagecast.planner_app.server.recording import JournalKeeper
from pagecast.planner_app.server.tokenizer import NumberTokenizer, PackedTokenizer, Tokenizer, tokenizer_for
from pagecast.sim.core.errors import BadInput

_NO_LOGPROBS = -1


def engine_replica(engine: Engine, tokenizer: Path | None, options: ServerOptions) -> ReplicaServer:
    """A replica of an engine, which it closes in the end. Errors: BadInput."""
    facts = engine.loaded.spec.facts
    if options.lora_modules:
        raise BadInput("--lora-modules needs --simulate: the engine has no adapters")
    chosen: Tokenizer = tokenizer_for(options.model, tokenizer)
    if isinstance(chosen, PackedTokenizer):
        chosen = NumberTokenizer(facts.vocab)
    backend = EngineBackend(engine, chosen, most_waiting=options.max_waiting_queue_length)
    limits = engine.limits
    if options.record is not None:
        meta = {"name": f"{facts.name} served", **described(engine)}
        backend.history.add(JournalKeeper(options.record, meta, segment_bytes=options.record_segment_bytes))
    if options.kv_events_endpoint is not None:
        endpoints = (options.kv_events_endpoint, options.kv_events_replay_endpoint)
        publisher = Publisher(*endpoints, options.kv_events_topic)
        backend.history.add(KvEvents(lambda: engine.loop.scheduler.events, publisher))
    cache_config = {
        "block_size": str(limits.block_size),
        "cache_dtype": str(engine.loaded.kv.dtype).removeprefix("torch."),
        "enable_prefix_caching": str(limits.caching),
        "gpu_memory_utilization": str(engine.options.gpu_memory_utilization),
        "num_gpu_blocks": str(limits.num_blocks),
    }
    metrics = ServerMetrics(backend, options.names[0], cache_config=cache_config)
    backend.observer = metrics
    intake = RequestIntake(
        chosen,
        options.names,
        {},
        backend.max_model_len,
        vocabulary=facts.vocab,
        most_logprobs=_NO_LOGPROBS,
    )
    return ReplicaServer(backend, intake, metrics, options)
