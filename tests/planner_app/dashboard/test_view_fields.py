"""A field that `Scenario` gains is an option of the commands and a widget of the dashboard."""

from dataclasses import dataclass

import pytest
from pagecast.planner_app.commands.engine_options import engine_fields
from pagecast.planner_app.commands.scenario_options import scenario_options
from pagecast.planner_app.dashboard.shell.view import SCENARIO, PageView, scenario_defaults
from pagecast.planner_app.dashboard.shell.widgets import (
    host_look,
    more_looks,
    server_looks,
    tier_looks,
    window_look,
)
from pagecast.sim.core.option import option
from pagecast.sim.scenario import Scenario


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Larger(Scenario):
    """A scenario with fields that no command and no page has heard of."""

    speculative_tokens: int = option("tokens drafted per step", 3, ge=1, le=16)
    host_gib: float | None = option("host memory for KV", None, gt=0)
    swap: bool = option("preempt by swapping", False)
    enforce_eager: bool = option("no CUDA graphs", False)


NEW = ("speculative_tokens", "host_gib", "swap", "enforce_eager")


def test_a_new_field_is_an_option():
    options = {one.name: one for one in scenario_options(Larger)}
    assert set(options) == {"scenario", "launch", "log", *Larger.flat_fields()}
    help_of = {name: options[name].annotation.__metadata__[0].help for name in NEW}
    assert help_of["speculative_tokens"] == "tokens drafted per step [3]"
    assert help_of["host_gib"] == "host memory for KV"
    assert help_of["swap"] == "preempt by swapping [off]"


def test_a_new_field_that_the_engine_has_is_an_option_of_its_commands():
    assert set(engine_fields(Larger)) - set(engine_fields()) == {"enforce_eager"}


def test_a_new_field_is_a_parameter_and_a_widget():
    defaults = scenario_defaults(Larger)
    assert [defaults[name] for name in NEW] == [3, None, False, False]
    looks = more_looks(Larger)
    assert [looks[name].widget for name in NEW] == ["number_input", "number_input", "toggle", "toggle"]
    assert looks["speculative_tokens"].label == "Speculative tokens"
    wanted = {"step": 1, "min_value": 1, "max_value": 16, "help": "tokens drafted per step"}
    assert looks["speculative_tokens"].options == wanted


def test_every_field_has_one_widget():
    names = [*server_looks(), *host_look(), *tier_looks(), *window_look(), *more_looks()]
    assert names == list(dict.fromkeys(names))
    assert set(names) == set(SCENARIO) == set(Scenario.flat_fields())


def test_defaults_are_those_of_a_scenario_but_for_what_a_slider_shows():
    fields = {name: info.default for name, info in Scenario.flat_fields().items()}
    on_sliders = {"kv_offloading_size"}
    assert {name for name in fields if fields[name] != SCENARIO[name]} == on_sliders
    assert PageView().scenario().host is None


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        (
            "block_size=32&gpu_memory_utilization=0.8&enable_prefix_caching=false",
            {"block_size": 32, "gpu_memory_utilization": 0.8, "enable_prefix_caching": False},
        ),
        ("kv_tokens=5000&engine=pagecast", {"kv_tokens": 5000, "engine": "pagecast"}),
        ("kv_tokens=&max_num_seqs=", {"kv_tokens": None, "max_num_seqs": None}),
    ],
)
def test_a_link_gives_the_fields(query, fields):
    scenario = PageView.from_query(query).scenario()
    assert {name: scenario.flat()[name] for name in fields} == fields
