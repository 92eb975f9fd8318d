"""Parts of one replica's scheduler."""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.lifecycle import Lifecycle
from pagecast.sim.core.rules.rules import Mix
from pagecast.sim.core.step import Step
from pagecast.sim.core.stretch.stride import Stride


class Parts(NamedTuple):
    """Parts that a profile has made for each other. The life cycle has the memory, the queue and the log."""

    lifecycle: Lifecycle
    step: Step
    mix: Mix
    stride: Stride
