"""Random lives of the core: no operation breaks an invariant, nothing is lost, nothing waits for ever."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from driver import Life, endless

from pagecast.sim.core.check import check

OPERATIONS = 250
SETTINGS = settings(
    max_examples=170, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.parametrize("ids", [False, True], ids=["spans", "ids"])
@pytest.mark.parametrize("profile", ["vllm", "nano-vllm"])
@given(data=st.binary(min_size=700, max_size=1400))
@SETTINGS
def test_no_operation_breaks_an_invariant(profile, ids, data):
    """4 x 170 lives of 250 operations: submit, step, cancel, preempt, evict, repeat an id."""
    life = Life(endless(data), profile, ids=ids)
    while life.operations < OPERATIONS:
        life.operate()
        if life.operations % 25 == 0:
            check(life.s)
    life.drain()
