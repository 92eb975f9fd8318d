"""What AIPerf's and guidellm's own generators draw: quantiles and means, kept in `recorded/`.

    python drive_other_tools.py aiperf recorded/aiperf.json
    python drive_other_tools.py guidellm recorded/guidellm.json

run with interpreters that have AIPerf 0.13 or guidellm 0.8 installed. Their random numbers are their own, so
that a load can be the same in distribution only.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

COUNT, POINTS = 40_000, 20


def told(load: dict[str, Any], column: str, values: Iterator[float]) -> dict[str, Any]:
    """A case: the load that is to give the same, what of it is compared, and what the tool has drawn."""
    drawn = sorted(itertools.islice(values, COUNT))
    quantiles = [round(drawn[COUNT * point // POINTS], 6) for point in range(1, POINTS)]
    return {"load": load, "column": column, "mean": round(sum(drawn) / COUNT, 6), "quantiles": quantiles}


def forever(draw: Callable[[], float]) -> Iterator[float]:
    """What is drawn, again and again."""
    while True:
        yield draw()


def aiperf() -> Iterator[dict[str, Any]]:
    """Lengths, turns, times between requests, and the times at which places open."""
    from aiperf.common import random_generator
    from aiperf.plugin.enums import ArrivalPattern
    from aiperf.timing import intervals, ramping
    from aiperf.timing.ramping import RamperConfig, RampType

    random_generator.init(7)

    def gaps(kind: Any, pattern: Any, **more: float) -> Iterator[float]:
        config = intervals.IntervalGeneratorConfig(arrival_pattern=pattern, request_rate=4.0, **more)
        return forever(kind(config).next_interval)

    lengths = random_generator.derive("lengths")
    for mean, sd in ((1000, 200), (60, 40)):
        draw = lambda mean=mean, sd=sd: lengths.sample_positive_normal_integer(mean, sd)  # noqa: E731
        yield told({"input_len": f"truncated:mean={mean},sd={sd}"}, "input_tokens", forever(draw))
        yield told({"output_len": f"truncated:mean={mean},sd={sd}"}, "output_tokens", forever(draw))
    yield told(
        {"request_rate": 4.0}, "gaps", gaps(intervals.PoissonIntervalGenerator, ArrivalPattern.POISSON)
    )
    for smoothness in (0.4, 5.0):
        drawn = gaps(intervals.GammaIntervalGenerator, ArrivalPattern.GAMMA, arrival_smoothness=smoothness)
        yield told({"request_rate": 4.0, "burstiness": smoothness}, "gaps", drawn)
    even = gaps(intervals.ConstantIntervalGenerator, ArrivalPattern.CONSTANT)
    yield told({"request_rate": 4.0, "burstiness": "inf"}, "gaps", even)
    config = RamperConfig(ramp_type=RampType.LINEAR, start=1, target=8, duration_sec=3.5)
    strategy, at, opens = ramping.LinearStrategy(config), 0.0, [0.0]
    now = strategy.start
    while (step := strategy.next_step(now, at)) is not None:
        at, now = at + step[0], step[1]
        opens.append(round(at, 6))
    yield {"load": {"concurrency": 8, "concurrency_ramp": 3.5}, "opens": opens}


def guidellm() -> Iterator[dict[str, Any]]:
    """Lengths of its synthetic texts, and times between requests of its Poisson strategy."""
    import random

    from guidellm.utils.random import IntegerRangeSampler

    for average, sd, least, most, law in (
        (1000, 200, None, None, "normal:mean=1000,sd=200"),
        (1000, 400, 700, 1500, "normal:mean=1000,sd=400,min=700,max=1500"),
        (300, None, 64, 1024, "uniform:64-1024"),
    ):
        drawn = iter(IntegerRangeSampler(average, sd, least, most, 7))
        yield told({"input_len": law}, "input_tokens", drawn)
        yield told({"output_len": law}, "output_tokens", drawn)
    times = random.Random(7)  # as AsyncPoissonStrategy.next_request_time draws them
    yield told({"request_rate": 4.0}, "gaps", forever(lambda: times.expovariate(4.0)))


if __name__ == "__main__":
    tool = sys.argv[1]
    lines = [json.dumps(case) for case in {"aiperf": aiperf, "guidellm": guidellm}[tool]()]
    text = f'{{"{tool}": "{version(tool)}", "cases": [\n' + ",\n".join(lines) + "\n]}\n"
    Path(sys.argv[2]).write_text(text, encoding="utf-8")
