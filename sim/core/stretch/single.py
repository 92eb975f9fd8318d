"""Single steps: no stretches, for rules that look at every step."""

from __future__ import annotations

from pagecast.sim.core.stretch.stride import Stride


class SingleSteps(Stride):
    """Plans no stretches: every step is decided."""

    def quiet(self) -> int:
        """None."""
        return 0
