"""Replay of a trace on a simulated server, with its requests, its records and its metrics.

    from pagecast.sim.replay import replay

Importing this package, or one of its modules, loads no other: its names are found when used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagecast.sim.replay.result import Kept, Result
    from pagecast.sim.replay.simulation import replay

__all__ = ["Kept", "Result", "replay"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pagecast.sim.replay import simulation

        return getattr(simulation, name)
    raise AttributeError(f"module 'pagecast.sim.replay' has no attribute {name!r}")
