"""Observation of an engine at work, for those who measure it: of its steps and of the ends of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagecast.engine.engine import Engine
    from pagecast.engine.loop import Log
    from pagecast.engine.sequence import Sequence


@contextmanager
def observed(engine: Engine, log: Log, on_end: Callable[[Sequence], None]) -> Iterator[None]:
    """Meanwhile `log` is told of each step and `on_end` of each sequence that ends.

    After an error no request is live any more: the engine serves others as before. One that can't even drain
    is closed. The error is raised as it was.
    """
    loop = engine.loop
    loop.log = log
    engine.on_end = on_end
    try:
        try:
            yield
        finally:
            loop.log = None
            engine.on_end = None
    except BaseException:
        engine.end_all()
        raise
