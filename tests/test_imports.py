"""Imports of each part: the core stays bare, the simulator never loads torch."""

import json
import subprocess
import sys

HEAVY = ("torch", "triton", "transformers", "streamlit", "simpy", "pandas", "pyarrow", "pydantic", "typer")


def _modules_after(statement):
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_package_alone_loads_nothing():
    loaded = _modules_after("import pagecast; pagecast.__version__")
    assert [name for name in loaded if name.split(".")[0] == "pagecast"] == ["pagecast"]
    assert not loaded.intersection((*HEAVY, "importlib.metadata", "numpy"))


def test_the_core_needs_numpy_and_xxhash_only():
    loaded = _modules_after("import pagecast.sim.core.scheduler, pagecast.sim.core.check")
    assert not loaded.intersection(HEAVY)


def test_a_scenario_loads_little_of_pagecast_and_no_tables():
    loaded = _modules_after("import pagecast.sim.scenario")
    core = ("scheduler", "lifecycle", "memory", "tiers", "rules", "identity", "engines.profile")
    apart = ("traces", "planner_app", "sim.machine", "sim.costs", "sim.replay", "sim.replica")
    parts = tuple(f"pagecast.{name}" for name in (*apart, *(f"sim.core.{name}" for name in core)))
    assert not [name for name in loaded if name.startswith(parts)]
    assert not loaded.intersection({"numpy", "scipy", "simpy", "pandas", "pyarrow", "torch"})


def test_step_costs_are_predicted_without_the_code_that_fits_them():
    loaded = _modules_after("from pagecast.sim.scenario import Scenario; Scenario().step_costs()")
    assert "pagecast.sim.costs.calibration.calibrated" in loaded
    apart = ("pagecast.sim.fitting", "pagecast.sim.runs", "pagecast.sim.replay", "pandas", "scipy")
    assert not [name for name in loaded if name.startswith(apart)]


def test_help_and_version_load_no_command():
    for option in ("--help", "--version"):
        loaded = _modules_after(f"from pagecast.planner_app.cli import run; run(['{option}'])")
        heavy = {"numpy", "scipy", "simpy", "pandas", "pyarrow", "pydantic", "rich", "yaml"}
        assert not loaded.intersection(heavy)
        parts = ("pagecast.sim.", "pagecast.planner_app.commands.")
        assert {name for name in loaded if name.startswith(parts)} == {
            "pagecast.planner_app.commands.registry",
            "pagecast.sim.core",
            "pagecast.sim.core.errors",
        }


def test_the_simulator_and_the_command_line_load_no_torch():
    loaded = _modules_after("import pagecast.sim.replay.simulation, pagecast.planner_app.cli")
    assert not loaded.intersection(("torch", "triton", "transformers", "streamlit"))
