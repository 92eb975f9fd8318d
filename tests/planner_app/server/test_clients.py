"""Load generators in common use run against the server; what they report is what was recorded.

They are installed apart from pagecast; `tests/benchmarks/serve_clients.py` says how they are named. A test
without its client skips. The server needs a core for itself, or clients report its delays too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_clients.py"
NEEDED = {"vllm": "PAGECAST_VLLM_PYTHON", "aiperf": "PAGECAST_AIPERF", "guidellm": "PAGECAST_GUIDELLM"}
CLIENTS = (
    *("openai-completions", "openai-chat", "openai-chat-whole", "vllm-completions", "vllm-chat"),
    *("aiperf-chat", "aiperf-chat-whole", "guidellm-chat", "guidellm-chat-whole"),
)
BACKENDS = {
    "simulated": ("--requests", "12"),
    "engine": ("--engine", "--requests", "8", "--prompt", "300", "--output", "24", "--rate", "0.2"),
}


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reports_what_was_recorded(client: str, backend: str) -> None:
    variable = NEEDED.get(client.split("-")[0])
    if variable and not os.environ.get(variable):
        pytest.skip(f"{variable} is not set")
    command = [sys.executable, str(SCRIPT), client, *BACKENDS[backend]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
