"""Options of the server itself; what is simulated is a `Scenario`, what the engine runs its `Options`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagecast.sim.core.errors import BadInput

FAILURES = (
    "rate_limit",
    "invalid_api_key",
    "context_length",
    "server_error",
    "invalid_request",
    "model_not_found",
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How requests are taken, and which are refused. Names are vLLM's or llm-d-inference-sim's where these
    have them; `failure_injection_rate` is in percent."""

    model: str
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    replicas: int = 1
    api_key: str | None = None
    lora_modules: tuple[str, ...] = ()
    max_loras: int = 1
    max_waiting_queue_length: int | None = None
    max_body_bytes: int = 32 << 20
    max_connections: int | None = None
    body_timeout_s: float = 30.0
    drain_timeout_s: float = 60.0
    failure_injection_rate: float = 0.0
    failure_types: tuple[str, ...] = field(default=FAILURES)
    seed: int = 0
    record: Path | None = None
    record_segment_bytes: int = 64 << 20
    kv_events_endpoint: str | None = None
    kv_events_replay_endpoint: str | None = None
    kv_events_topic: str = ""
    kv_events_batch: int | None = None

    def check(self) -> None:
        """Errors: BadInput naming the first option that can't work."""
        if not 0 <= self.port <= 65535 or self.port + self.replicas - 1 > 65535:
            raise BadInput(f"--port {self.port}: ports go up to 65535, and each replica needs one")
        if self.port == 0 and self.replicas > 1:
            raise BadInput("--port 0 is for one replica; name the first of the replicas' ports")
        if not 0 <= self.failure_injection_rate <= 100:
            raise BadInput(
                f"--failure-injection-rate is {self.failure_injection_rate}; it is 0 to 100 percent"
            )
        for name in self.failure_types:
            if name not in FAILURES:
                raise BadInput(f"--failure-types {name!r} is not known; choose of {', '.join(FAILURES)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names the model is served under; the first is the one that answers carry."""
        return self.served_model_name or (self.model,)

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters: name and path. Entries are `name=path`, a name alone, or vLLM's JSON."""
        import json

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
