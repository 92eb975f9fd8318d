"""Engine over a paged KV cache in PyTorch, scheduled by `pagecast.sim.core`.

    from pagecast.engine import Engine, SamplingParams

Importing this package imports no torch; using one of its names does.
"""

from typing import Any

_HOME = {
    "Engine": "engine",
    "Completion": "engine",
    "Output": "engine",
    "Options": "options",
    "SamplingParams": "params",
}
__all__ = ["Completion", "Engine", "Options", "Output", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"pagecast.engine.{_HOME[name]}"), name)
    raise AttributeError(f"module 'pagecast.engine' has no attribute {name!r}")
