"""The section of a report that says of what its figures are: every field of the scenario, and the costs."""

from __future__ import annotations

from pagecast.planner_app.reports.html_page import HtmlTable, Section
from pagecast.sim.scenario import Scenario


def scenario_section(scenario: Scenario, costs: str, caption: str = "") -> Section:
    """The fields of a scenario, and `costs`, the step costs that it came to; `caption` says what differs."""
    rows = [(name, "-" if value is None else str(value)) for name, value in scenario.resolved().items()]
    rows.append(("step costs used", costs))
    return Section("Scenario", [HtmlTable("", ("field", "value"), rows, caption)])
