"""Other simulators, run beside pagecast where they install. Each returns the seconds of its whole call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

DYNAMO = "ai-dynamo-runtime==1.6.1"
_RUN_DYNAMO = """
import json, sys, time
from dynamo._core import run_mocker_trace_replay
a = json.loads(sys.argv[1])
begun = time.perf_counter()
run_mocker_trace_replay(
    [a["file"]], extra_engine_args=dict(engine=dict(backend="vllm", num_gpu_blocks=a["blocks"], block_size=16,
    max_num_seqs=256, max_num_batched_tokens=8192)), trace_format="mooncake",
    trace_block_size=512, num_workers=a["workers"], router_mode="round_robin",
    arrival_speedup_ratio=a["speedup"])
print(time.perf_counter() - begun)
"""


def peer_python(folder: Path) -> Path | None:
    """A Python that has Dynamo's mocker, installed into `folder` if need be; None where that fails."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", DYNAMO]
        subprocess.run(install, check=False, capture_output=True)
    probe = subprocess.run([str(python), "-c", "import dynamo._core"], check=False, capture_output=True)
    return python if probe.returncode == 0 else None


def dynamo_seconds(python: Path, file: Path, blocks: int, speedup: float = 1.0, workers: int = 1) -> float:
    """Seconds of one replay call of Dynamo's mocker (parsing included) on a Mooncake-format file."""
    options: dict[str, Any] = {"file": str(file), "blocks": blocks, "speedup": speedup, "workers": workers}
    command = [str(python), "-c", _RUN_DYNAMO, json.dumps(options)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return float(done.stdout.strip().splitlines()[-1])
