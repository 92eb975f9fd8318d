"""Herding and imbalance: even choices are even, whichever replicas there were to choose from."""

import numpy as np
import pandas as pd
import pytest
from pagecast.sim.fleet.choices import Choices
from pagecast.sim.fleet.gauges import NOTHING
from pagecast.sim.fleet.settings import FleetSettings
from pagecast.sim.fleet.simulation import replay_fleet
from pagecast.sim.fleet.spread import herding, imbalance
from pagecast.sim.fleet.view import View
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace

QUICK = {"engine_s": 1.0, "disk_bytes_per_s": 1e12}
VIEWS = [View(number, f"r{number}", gauges=lambda now: NOTHING) for number in range(3)]


def apart(prefill, decode):
    groups = [
        {"name": "p", "role": "prefill", "replicas": prefill},
        {"name": "d", "role": "decode", "replicas": decode},
    ]
    return {"groups": groups, "disaggregation": {"decode_router": "round-robin"}}


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": [{"replicas": 4}]},
        apart(2, 2),
        apart(2, 6),
        {"groups": [{"replicas": 2}], "rollout": {"at_s": 20}},
        {
            "groups": [{"replicas": 2}],
            "incidents": [{"at_s": 20, "replica": "replica-0", "back_after_s": 2}],
        },
    ],
    ids=["static", "2 and 2", "2 and 6", "rollout", "loss"],
)
def test_one_replica_after_the_other_is_an_even_spread(fields):
    table = pd.DataFrame({"arrival_s": np.arange(400) / 10, "input_tokens": 2000, "output_tokens": 100})
    fleet = FleetSettings.make({**fields, "startup": QUICK})
    figures = replay_fleet(Trace("even", table), Scenario(costs="roofline"), fleet).summary["fleet"]
    assert figures["herding"] == 0
    assert figures["imbalance"] == pytest.approx(1, abs=0.02)


def choices_of(runs):
    """Choices of (numbers that can be chosen, numbers chosen), row after row."""
    choices = Choices()
    rows = iter(range(1000))
    for replicas, chosen in runs:
        for number in chosen:
            choices.add(next(rows), VIEWS[number], [VIEWS[each] for each in replicas])
    return choices


def served_by(choices, tokens=10):
    """What ended on each replica: every row where it was sent."""
    rows = [row for run in choices.runs for row in run.rows]
    chosen = np.array([number for run in choices.runs for number in run.chosen])
    table = pd.DataFrame({"row": rows, "state": "completed", "admitted_s": 0.0, "input_tokens": tokens})
    table[["cached_tokens", "output_tokens"]] = [0, 1]
    return {number: table[chosen == number] for number in range(3)}


def test_herding_is_the_largest_share_of_those_that_could_be_chosen():
    assert herding([choices_of([((0, 1), [0] * 8)])]) == 1
    assert herding([choices_of([((0, 1), [0] * 6 + [1] * 2)])]) == 0.5
    # Eight of two replicas, then twelve of three: 1 and (8/12 - 1/3) / (2/3).
    mixed = choices_of([((0, 1), [0] * 8), ((0, 1, 2), [0] * 8 + [1] * 2 + [2] * 2)])
    assert herding([mixed]) == pytest.approx((1 + 0.5) / 2)
    assert herding([choices_of([((0, 1), [0] * 7)]), choices_of([((0,), [0] * 50)])]) == 0


def test_imbalance_is_the_largest_excess_over_an_even_share():
    all_to_one = choices_of([((0, 1, 2), [0] * 6)])
    assert imbalance([all_to_one], served_by(all_to_one), 6) == pytest.approx(3)
    # Even shares are 3, 3 + 2 and 2 requests, which 4, 4 and 2 of them compare with: 1 more than the first's.
    moved = choices_of([((0, 1), [0, 0, 0, 0, 1, 1]), ((1, 2), [1, 1, 2, 2])])
    assert imbalance([moved], served_by(moved), 10) == pytest.approx(1 + 1 / (10 / 3))
    assert imbalance([all_to_one, moved], served_by(all_to_one), 10) >= 3
    nothing = choices_of([])
    assert imbalance([nothing], {}, 0) == 1


def test_work_that_was_lost_with_a_replica_counts_nowhere():
    sent_again = choices_of([((0, 1), [0, 0])])
    sent_again.add(0, VIEWS[1], [VIEWS[1]])
    served = served_by(choices_of([((0, 1), [1, 0])]))
    assert imbalance([sent_again], served, 2) == pytest.approx(1 + (1 - 0.5) / 1)
