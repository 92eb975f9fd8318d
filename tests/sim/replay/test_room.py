"""Other limits that the room of a replay holds for: all is decided alike and takes the same."""

import numpy as np
import pytest
from pagecast.sim.replay import Kept, replay
from pagecast.sim.scenario import Scenario
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.generate import Conversations, conversations
from pagecast.traces.lengths import parse

OF_POOL = ("num_gpu_blocks", "peak_kv_usage", "evicted_blocks", "wall_s", "defaults")


def drawn_trace(generator, seed):
    shape = Conversations(
        ArrivalProcess("poisson", float(generator.choice([2, 10, 40])), 1.0),
        parse("uniform:1-4"),
        parse("lognormal:p50=60,sigma=1"),
        parse("lognormal:p50=30,sigma=1"),
        parse("lognormal:p50=0.5,sigma=1"),
        [(), (90,), (40, 200)][generator.integers(3)],
        parse("lognormal:p50=80,sigma=1"),
        most_tokens=1000,
    )
    return conversations(shape, sessions=int(generator.integers(4, 14)), count=200, seed=seed)


def drawn_limits(generator):
    return {
        "num_gpu_blocks": int(generator.choice([70, 90, 120, 160, 250, 400, 1000, 1100])),
        "max_num_seqs": int(generator.choice([1, 2, 4, 9, 20, 40, 60])),
        "max_num_batched_tokens": int(generator.choice([64, 500, 1500, 4000, 5000])),
    }


def drawn_scenarios(generator):
    engine = str(generator.choice(["vllm@0.24", "vllm@0.33", "pagecast"]))
    others = {
        "costs": str(generator.choice(["auto", "roofline", "measured"][: 2 + engine.startswith("vllm")])),
        "engine": engine,
        "max_model_len": 1000,
        "async_scheduling": bool(generator.integers(2)),
        "enable_prefix_caching": bool(generator.random() < 0.8),
        "scheduling_policy": str(generator.choice(["fcfs", "priority"])),
    }
    limits = [drawn_limits(generator) for _ in range(4)]
    limits.append(
        {**limits[0], "num_gpu_blocks": limits[0]["num_gpu_blocks"] + int(generator.integers(1, 60))}
    )
    return [Scenario(**others, **each) for each in limits]


def checked(number):
    """How often a room held for other limits, and of these how often for a pool that evicted something."""
    generator = np.random.default_rng(number)
    trace = drawn_trace(generator, number)
    scenarios = drawn_scenarios(generator)
    results = [replay(trace, scenario, kept=Kept(room=True)) for scenario in scenarios]
    held = evicting = 0
    for base in results:
        for other in results:
            if other is base or not base.room.holds(other.scenario):
                continue
            held += 1
            blocks = other.scenario.num_gpu_blocks
            evicting += bool(base.summary["evicted_blocks"]) and blocks > base.room.limits.num_blocks
            assert base.requests.equals(other.requests)
            mine, theirs = (
                {name: value for name, value in result.summary.items() if name not in OF_POOL}
                for result in (base, other)
            )
            assert mine == theirs
            assert other.summary["evicted_blocks"] == base.room.evicted_in(blocks)
            assert other.summary["peak_kv_usage"] == base.room.blocks / blocks
    return held, evicting


def test_random_replays_go_the_same_way_where_their_room_says_so():
    counts = [checked(number) for number in range(10)]
    assert sum(held for held, _ in counts) > 10
    assert sum(evicting for _, evicting in counts) > 1


@pytest.mark.slow
def test_600_random_replays_go_the_same_way_where_their_room_says_so():
    counts = [checked(number) for number in range(1000, 1600)]
    assert sum(held for held, _ in counts) > 800
    assert sum(evicting for _, evicting in counts) > 100
