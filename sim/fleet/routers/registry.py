"""Routers by name, made from settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pagecast.sim.core.errors import BadInput
from pagecast.sim.fleet.index.approximate import FOREVER_NS, ApproximateIndex
from pagecast.sim.fleet.index.events import EventIndex
from pagecast.sim.fleet.index.known import ApproximatePrefixes, EventPrefixes, KnownPrefixes
from pagecast.sim.fleet.routers.aibrix import AIBrix
from pagecast.sim.fleet.routers.cost import ExpectedCost
from pagecast.sim.fleet.routers.dynamo import Dynamo
from pagecast.sim.fleet.routers.llm_d import LlmD
from pagecast.sim.fleet.routers.load import LeastLoaded, PowerOfTwo, Randomly, RoundRobin
from pagecast.sim.fleet.routers.prefix_affinity import PrefixAffinity
from pagecast.sim.fleet.routers.production_stack import ProductionStack
from pagecast.sim.fleet.routers.router import Router
from pagecast.sim.fleet.routers.session import SessionAffinity
from pagecast.sim.fleet.routers.sglang import SGLang
from pagecast.sim.fleet.settings import RouterSettings

NS = 1_000_000_000
_CHARACTERS = 4  # of a token, for routers that look at texts
_OF_GUESS = ("block_tokens", "index_blocks", "index_ttl_s")  # settings of an approximate index
_OF_INDEX = ("index", "index_delay_s", *_OF_GUESS)
_FLAGS = {"index": "--index", "index_delay_s": "--index-delay", "metrics_period_s": "--metrics-period"}


@dataclass(frozen=True)
class RouterKind:
    """A kind of router: how it is made, and the defaults of what it sees.

    `options` are its weights and thresholds with their defaults. `index` is its default; in a mode of
    `mode_indexes` (its option `mode`) it has the index named there and no other, or with None it does not
    look at what is cached.
    """

    make: Callable[[Parts], Router]
    about: str
    metrics_period_s: float | None = None  # None: it reads no gauges
    index: str | None = None
    block_tokens: int | None = None  # None: the engines' block size
    index_blocks: int | None = None
    index_ttl_s: float | None = None
    most_tokens: int | None = None
    leaf_first: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    mode_indexes: dict[str, str | None] = field(default_factory=dict)

    def index_of(self, settings: RouterSettings) -> str | None:
        """The index it uses with these settings. Errors: BadInput for an index that its mode can't use."""
        mode = settings.options.get("mode")
        if mode not in self.mode_indexes:
            return None if self.index is None else settings.index or self.index
        index = self.mode_indexes[str(mode)]
        if index is not None and settings.index not in (None, index):
            raise BadInput(
                f"router {settings.policy} in mode {mode} uses an index of {index}; "
                f"leave --index {settings.index} out"
            )
        return index


@dataclass
class Parts:
    """Parts of a router. `events` is the index that the replicas' events go to, where there is one.

    `without_events`: what to do where replicas have no such events.
    """

    rng: Random
    options: dict[str, Any]
    prefixes: KnownPrefixes | None
    events: EventIndex | None
    metrics_period_ns: int
    without_events: str = "use --index approximate"

    @property
    def known(self) -> KnownPrefixes:
        """The prefixes of a router that needs them."""
        assert self.prefixes is not None
        return self.prefixes


KINDS: dict[str, RouterKind] = {
    "round-robin": RouterKind(lambda parts: RoundRobin(), "one replica after the other"),
    "random": RouterKind(lambda parts: Randomly(parts.rng), "any replica"),
    "least-loaded": RouterKind(lambda parts: LeastLoaded(parts.rng), "fewest requests in flight"),
    "power-of-two": RouterKind(lambda parts: PowerOfTwo(parts.rng), "fewer requests of two drawn at random"),
    "session": RouterKind(lambda parts: SessionAffinity(parts.rng), "a session keeps to its replica"),
    "prefix-affinity": RouterKind(
        lambda parts: PrefixAffinity(parts.known, parts.rng, parts.options["min_share"]),
        "longest cached prefix, whatever the load",
        index="approximate",
        options={"min_share": 0.3},
    ),
    "cost": RouterKind(
        lambda parts: ExpectedCost(parts.known, parts.rng),
        "least queue delay + missing prefill + expected decode",
        index="approximate",
    ),
    "llm-d": RouterKind(
        lambda parts: LlmD(parts.known, parts.rng, **parts.options),
        "llm-d's endpoint picker: queue, KV use and prefix scores",
        metrics_period_s=0.05,
        index="approximate",
        block_tokens=64,
        index_blocks=31_250,
        most_tokens=131_072,
        leaf_first=False,
        options={"queue": 2.0, "kv": 2.0, "prefix": 3.0},
    ),
    "dynamo": RouterKind(
        lambda parts: Dynamo(parts.known, parts.rng, **parts.options),
        "Dynamo's KV router: prefill and decode blocks, less the overlap",
        index="events",
        index_ttl_s=120.0,
        options={
            "prefill_load_scale": 1.0,
            "overlap_score_credit": 1.0,
            "overlap_score_credit_decay": 0.0,
            "active_request_weight": 0.0,
            "temperature": 0.0,
        },
    ),
    "sglang": RouterKind(
        lambda parts: SGLang(parts.known, parts.rng, **parts.options),
        "SGLang's gateway: cache_aware",
        index="approximate",
        block_tokens=1,
        index_blocks=(1 << 26) // _CHARACTERS,
        options={"cache_threshold": 0.3, "balance_abs_threshold": 64, "balance_rel_threshold": 1.5},
    ),
    "aibrix": RouterKind(
        lambda parts: AIBrix(parts.known, parts.rng, **parts.options),
        "AIBrix's gateway: prefix-cache",
        index="approximate",
        block_tokens=128 // _CHARACTERS,
        index_blocks=200_000,
        index_ttl_s=20 * 60.0,
        options={"factor": 2.0, "min_gap": 8, "deviations": 1.0},
    ),
    "production-stack": RouterKind(
        lambda parts: ProductionStack(parts.known, parts.rng, **parts.options),
        "vLLM production stack's router: prefixaware, or its other modes",
        index="approximate",
        block_tokens=128 // _CHARACTERS,
        options={"mode": "prefixaware", "kv_aware_threshold": 2000},
        mode_indexes={"roundrobin": None, "priority": None, "session": None, "kvaware": "events"},
    ),
}


def make(settings: RouterSettings, seed: int, block_size: int) -> tuple[Router, Parts]:
    """A router and its parts. `block_size` is the engines'.

    Errors: BadInput for names that are not known, and for settings of what the router does not use.
    """
    kind = KINDS.get(settings.policy)
    if kind is None:
        raise BadInput(f"router {settings.policy!r} is not known; routers are {', '.join(KINDS)}")
    _refuse_unused(kind, settings)
    parts = Parts(
        rng=Random(seed),
        options=_options(kind, settings),
        prefixes=None,
        events=None,
        metrics_period_ns=_metrics_period_ns(kind, settings),
    )
    if kind.index_of(settings) == "events":
        parts.events = EventIndex(delay_ns=round((settings.index_delay_s or 0.0) * NS))
        parts.prefixes = EventPrefixes(parts.events, block_size)
        mode = settings.options.get("mode")
        if mode in kind.mode_indexes:
            parts.without_events = f"choose another mode than {mode}"
    elif kind.index is not None:  # in a mode without an index it stays empty
        ttl_s = settings.index_ttl_s or kind.index_ttl_s
        guess = ApproximateIndex(
            capacity=settings.index_blocks or kind.index_blocks,
            ttl_ns=FOREVER_NS if ttl_s is None else round(ttl_s * NS),
            delay_ns=round((settings.index_delay_s or 0.0) * NS),
            leaf_first=kind.leaf_first,
        )
        tokens = settings.block_tokens or kind.block_tokens or block_size
        parts.prefixes = ApproximatePrefixes(guess, tokens, kind.most_tokens)
    return kind.make(parts), parts


def with_router(settings: RouterSettings, policy: str) -> RouterSettings:
    """The settings of another router in the same place: its own options and index, and what else it uses."""
    other = settings.model_copy(update={"policy": policy, "options": {}, "index": None})
    kind = KINDS.get(policy)
    if kind is None:
        return other
    return other.model_copy(update=dict.fromkeys(_unused(kind, other)))


def _refuse_unused(kind: RouterKind, settings: RouterSettings) -> None:
    """Refuses settings of gauges or of an index that the router does not use. Errors: BadInput."""
    for name, reason in _unused(kind, settings).items():
        if getattr(settings, name) is not None:
            mode = f" in mode {settings.options['mode']}" if kind.index and "mode" in settings.options else ""
            raise BadInput(f"router {settings.policy}{mode} {reason}; leave {_FLAGS.get(name, name)} out")


def _unused(kind: RouterKind, settings: RouterSettings) -> dict[str, str]:
    """The settings that change nothing, and why."""
    unused = {}
    if kind.metrics_period_s is None:
        unused["metrics_period_s"] = "reads no gauges"
    index = kind.index_of(settings)
    if index is None:
        unused |= dict.fromkeys(_OF_INDEX, "uses no prefix index")
    elif index == "events":
        unused |= dict.fromkeys(_OF_GUESS, "follows KV events, which need no approximate index")
    return unused


def _metrics_period_ns(kind: RouterKind, settings: RouterSettings) -> int:
    """Nanoseconds between scrapes; 0: it reads no gauges."""
    return round((settings.metrics_period_s or kind.metrics_period_s or 0.0) * NS)


def _options(kind: RouterKind, settings: RouterSettings) -> dict[str, Any]:
    for name in settings.options:
        if name not in kind.options:
            known = ", ".join(kind.options) or "none"
            raise BadInput(f"router {settings.policy} has no option {name!r}; its options: {known}")
        if isinstance(settings.options[name], str) != isinstance(kind.options[name], str):
            kind_of = "a text" if isinstance(kind.options[name], str) else "a number"
            raise BadInput(f"router {settings.policy}: {name} is {settings.options[name]!r}; give {kind_of}")
    return {**kind.options, **settings.options}
