"""The dashboard as a script, for the tests that look at its pages without a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest


@pytest.fixture(scope="session")
def components_searched_once() -> Iterator[None]:
    """Each run of an `AppTest` has streamlit read the metadata of every installed package, as a server does
    once when it starts."""
    from streamlit.components.v2 import manifest_scanner as scanner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanner, "scan_component_manifests", cache(scanner.scan_component_manifests))
        yield


@pytest.fixture
def no_browser(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Pages do not wait for a browser's first look, and begin no jobs with it. At the end their jobs end."""
    pytest.importorskip("streamlit", reason="the dashboard needs the extra `app`")
    request.getfixturevalue("components_searched_once")
    from pagecast.planner_app.dashboard.shell import state
    from pagecast.planner_app.dashboard.what_if import refining

    monkeypatch.setattr(refining, "FIRST_LOOK_S", 0)
    yield
    state.stop_left(lambda number: False)


@pytest.fixture
def app(no_browser: None) -> Callable[..., Any]:
    """Opens the app as a browser does with these parameters in the URL; returns its `AppTest`."""
    from pagecast.planner_app.dashboard import server_start
    from streamlit.testing.v1 import AppTest

    def open_app(**parameters: object) -> AppTest:
        test = AppTest.from_file(server_start.__file__, default_timeout=60)
        for name, value in parameters.items():
            test.query_params[name] = value if isinstance(value, list) else str(value)
        return test.run()

    return open_app
