"""Simulator and capacity planner for LLM serving with a paged KV cache.

    from pagecast import Scenario, read, replay

    result = replay(read("chat"), Scenario(gpu="H100", max_num_seqs=64))

`import pagecast` loads no other module: each name of `__all__` is imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagecast.sim.core.errors import PagecastError
    from pagecast.sim.fleet.settings import FleetSettings, ReplicaGroup, RouterSettings
    from pagecast.sim.fleet.simulation import FleetResult, replay_fleet
    from pagecast.sim.replay.result import Kept, Result
    from pagecast.sim.replay.simulation import replay
    from pagecast.sim.scenario import Scenario
    from pagecast.traces.load import Load
    from pagecast.traces.read import read
    from pagecast.traces.schema import Trace

__version__ = "0.2.0"

_MODULES = {
    "FleetResult": "sim.fleet.simulation",
    "FleetSettings": "sim.fleet.settings",
    "Kept": "sim.replay.result",
    "Load": "traces.load",
    "PagecastError": "sim.core.errors",
    "ReplicaGroup": "sim.fleet.settings",
    "Result": "sim.replay.result",
    "RouterSettings": "sim.fleet.settings",
    "Scenario": "sim.scenario",
    "Trace": "traces.schema",
    "read": "traces.read",
    "replay": "sim.replay.simulation",
    "replay_fleet": "sim.fleet.simulation",
}

__all__ = [
    "FleetResult",
    "FleetSettings",
    "Kept",
    "Load",
    "PagecastError",
    "ReplicaGroup",
    "Result",
    "RouterSettings",
    "Scenario",
    "Trace",
    "__version__",
    "read",
    "replay",
    "replay_fleet",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pagecast' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"pagecast.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
