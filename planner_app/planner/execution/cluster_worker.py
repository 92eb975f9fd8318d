"""The part that runs on a Dask worker: functions are sent to it, and each is unpickled once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from distributed import WorkerPlugin
from pagecast.sim.core.errors import BadInput

_functions: dict[str, Callable[[Any], Any]] = {}


class Shipment(WorkerPlugin):  # type: ignore[misc]
    """A pickled function that the scheduler hands to every worker, and to those that join later."""

    def __init__(self, name: str, body: bytes) -> None:
        self.name = name
        self.body = body

    def setup(self, worker: Any) -> None:
        """The function becomes callable by its name."""
        _functions[self.name] = pickle.loads(self.body)

    def teardown(self, worker: Any) -> None:
        """And is forgotten."""
        _functions.pop(self.name, None)


def shipped(name: str) -> Callable[[Any], Any]:
    """The function called `name`. Errors: BadInput where this worker never got it."""
    try:
        return _functions[name]
    except KeyError:
        raise BadInput(f"a Dask worker has no {name}; restart the scheduler and its workers") from None
