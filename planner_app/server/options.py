"""Options of `serve`: of the server itself, and of the simulated backend's answers and pace.

What is simulated is a `Scenario`, what the engine runs its `Options`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Self

from pagecast.planner_app.options import PYTHON_ONLY, Flag, Options
from pagecast.planner_app.server.answers import Lengths, Mode
from pagecast.sim.core.errors import BadInput
from pydantic import Field, model_validator

FAILURES = (
    "rate_limit",
    "invalid_api_key",
    "context_length",
    "server_error",
    "invalid_request",
    "model_not_found",
)


class Simulation(Options):
    """The pace and the answers of the simulated backend. `time_scale`: simulated seconds per second."""

    time_scale: float = Field(default=1.0, description="simulated seconds in a second")
    mode: Mode = Field(default="random", description="text to answer with: random words, or echo the prompt")
    mean_output_tokens: int = Field(
        default=Lengths().mean, ge=1, description="mean length of answers whose request sets no max_tokens"
    )

    @property
    def lengths(self) -> Lengths:
        """How long such answers are."""
        return Lengths(self.mean_output_tokens)

    def check(self) -> None:
        """Errors: BadInput for a pace that can't be kept."""
        if not 0 < self.time_scale <= 1e6:
            raise BadInput(f"--time-scale is {self.time_scale}; it must be above 0, and at most a million")


class ServeOptions(Options):
    """How requests are taken, and which are refused. Names are vLLM's or llm-d-inference-sim's where these
    have them; `failure_injection_rate` is in percent. `model` and `seed`: those of what is served."""

    model: Annotated[str, PYTHON_ONLY] = ""
    seed: Annotated[int, PYTHON_ONLY] = 0
    host: str = Field(default="127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(default=8000, ge=0, le=65535, description="first port; 0 for any that is free")
    replicas: Annotated[int, Flag(("--replicas", "--data-parallel-size"))] = Field(
        default=1, ge=1, le=256, description="replicas, one port each"
    )
    served_model_name: tuple[str, ...] = Field(
        default=(), description="name to serve under, may be repeated [--model]"
    )
    api_key: Annotated[
        tuple[str, ...], Flag(("--api-key",), variables=("PAGECAST_API_KEY", "VLLM_API_KEY"))
    ] = Field(default=(), description="key that clients must send; may be repeated: any of them will do")
    tokenizer: Path | None = Field(
        default=None, description="transformers folder with tokenizer.json [the model's]"
    )
    lora_modules: tuple[str, ...] = Field(default=(), description="adapter as NAME=PATH, may be repeated")
    max_waiting_queue_length: int | None = Field(
        default=None, ge=0, description="requests that may wait; others get 429 [no limit]"
    )
    max_connections: int | None = Field(default=None, ge=1, description="connections at once; others get 503")
    max_body_bytes: int = Field(default=4 << 20, ge=1, description="longest body of a request")
    body_timeout: float = Field(
        default=30.0, ge=0.1, description="seconds within which a request's header, and its body, must arrive"
    )
    allowed_origins: Annotated[tuple[str, ...], Flag(("--allowed-origins",))] = Field(
        default=(), description="origin of web pages that may ask, may be repeated; * for all [none]"
    )
    allowed_hosts: Annotated[tuple[str, ...], Flag(("--allowed-hosts",))] = Field(
        default=(), description="host name that requests may be for, may be repeated [all]"
    )
    ssl_certfile: Path | None = Field(default=None, description="certificate, for https")
    ssl_keyfile: Path | None = Field(default=None, description="its private key")
    drain_timeout: float = Field(
        default=60.0, ge=0, description="seconds that requests under way have after SIGTERM"
    )
    record: Path | None = Field(default=None, description="folder for a recorded run of what is served")
    record_segment_bytes: Annotated[int, PYTHON_ONLY] = 64 << 20
    kv_events_endpoint: Annotated[str | None, Flag(("--kv-events-endpoint", "--zmq-endpoint"))] = Field(
        default=None, description="ZeroMQ endpoint for KV events"
    )
    kv_events_replay_endpoint: str | None = Field(
        default=None, description="ZeroMQ endpoint that sends missed KV events again"
    )
    kv_events_topic: str = Field(
        default="", description="topic of KV events; {rank} and {port} stand for those of the replica"
    )
    event_batch_size: int | None = Field(
        default=None, ge=1, description="most KV events in one message [those of a step]"
    )
    failure_injection_rate: float = Field(
        default=0.0, ge=0, le=100, description="percent of requests that fail on purpose"
    )
    failure_types: tuple[str, ...] = Field(
        default=(), description="failures to inject, may be repeated [all]"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.port + self.replicas - 1 > 65535:
            raise BadInput(f"--port {self.port}: ports go up to 65535, and each replica needs one")
        if self.port == 0 and self.replicas > 1:
            raise BadInput("--port 0 is for one replica; name the first of the replicas' ports")
        if any(not key.strip() for key in self.api_key):
            raise BadInput("--api-key is empty, and would let everybody in; give a key, or leave it out")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise BadInput("--ssl-certfile and --ssl-keyfile go together; give both")
        for path in (self.ssl_certfile, self.ssl_keyfile):
            if path is not None and not path.is_file():
                raise BadInput(f"--ssl-certfile, --ssl-keyfile: {path}: no such file")
        for name in self.failure_types:
            if name not in FAILURES:
                raise BadInput(f"--failure-types {name!r} is not known; choose of {', '.join(FAILURES)}")
        return self

    def topic(self, rank: int) -> str:
        """The topic of a replica's KV events."""
        port = self.port + rank if self.port else 0
        return self.kv_events_topic.replace("{rank}", str(rank)).replace("{port}", str(port))

    def of(self, model: str, seed: int) -> ServeOptions:
        """The same, for a model, and a seed of what is drawn."""
        return self.model_copy(update={"model": model, "seed": seed})

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model is served under; the first is the one that answers carry."""
        return self.served_model_name or (self.model,)

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters: name and path. Entries are `name=path`, a name alone, or vLLM's JSON."""
        by_name: dict[str, str] = {}
        for entry in self.lora_modules:
            if entry.lstrip().startswith("{"):
                try:
                    fields = json.loads(entry)
                    by_name[str(fields["name"])] = str(fields.get("path", ""))
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise BadInput(
                        f"--lora-modules {entry!r}: must be name=path, or JSON with a name"
                    ) from None
            else:
                name, _, path = entry.partition("=")
                by_name[name] = path
        return by_name
