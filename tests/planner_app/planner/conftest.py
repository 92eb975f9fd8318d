"""Plans that a test prints in several ways are made once."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pagecast.planner_app.planner.capacity import planning


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of a test plan once for each of the arguments that `plan` is given."""
    make: Callable[..., Any] = planning.plan
    made: dict[bytes, Any] = {}

    def once(*arguments: Any, **options: Any) -> Any:
        asked = {name: value for name, value in options.items() if name not in ("progress", "run")}
        key = pickle.dumps((arguments, asked))
        if key not in made:
            made[key] = make(*arguments, **options)
        return made[key]

    monkeypatch.setattr(planning, "plan", once)
