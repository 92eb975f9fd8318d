"""What importing a part pulls in: the core stays bare, the simulator never loads torch."""

import json
import subprocess
import sys

HEAVY = ("torch", "triton", "transformers", "streamlit", "simpy", "pandas", "pyarrow", "pydantic", "typer")


def _modules_after(statement):
    code = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_the_core_needs_numpy_and_xxhash_only():
    loaded = _modules_after("import pagecast.sim.core.scheduler, pagecast.sim.core.check")
    assert not loaded.intersection(HEAVY)


def test_the_simulator_and_the_command_line_load_no_torch():
    loaded = _modules_after("import pagecast.sim.replay.simulation, pagecast.planner_app.cli")
    assert not loaded.intersection(("torch", "triton", "transformers", "streamlit"))
