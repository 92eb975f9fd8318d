"""`replay(trace, scenario)`: how a server would have served a trace.

A replay is a pure function of trace, scenario and seed.

Clients submit the trace's requests, the scheduler of `sim.core` decides each step, and the scenario's step
costs time it. Times are seconds in results, integer nanoseconds inside.

    >>> from pagecast.sim.replay import replay
    >>> from pagecast.sim.scenario import Scenario
    >>> from pagecast.traces.read import read
    >>> result = replay(read("chat", limit=50), Scenario())
    >>> result.summary["completed"], round(result.summary["token_hit_rate"], 3)
    (50, 0.677)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.kv_events import KvEventStream
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.replay.clients import Arrivals
from pagecast.sim.replay.comparisons import add_comparisons
from pagecast.sim.replay.folder import replacing, save
from pagecast.sim.replay.held_clients import clients_of
from pagecast.sim.replay.metrics import measured
from pagecast.sim.replay.notes import notes
from pagecast.sim.replay.recorder import Recorder
from pagecast.sim.replay.result import Kept, Result
from pagecast.sim.replay.rollout import peak_admission
from pagecast.sim.replay.room import room_of, watch_content
from pagecast.sim.replay.served import Checking, Progress, alone, run
from pagecast.sim.replay.summary import summary
from pagecast.sim.replica.spec import ReplicaSpec
from pagecast.sim.replica.workload import TraceWorkload
from pagecast.sim.scenario import Scenario
from pagecast.traces.schema import Trace


def replay(
    trace: Trace,
    scenario: Scenario,
    *,
    costs: StepCosts | None = None,
    arrivals: Callable[[Trace], Arrivals] = clients_of,
    kept: Kept = Kept(),
    fast_forward: bool = True,
    check_every: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Serves `trace` on one replica of `scenario` and returns its figures.

    `costs` replaces the scenario's cost model. `arrivals` makes the clients from the trace: by default they
    keep to its times and its limit; `partial(ClosedLoop, users=8)` are users who wait for an answer.
    `kept`: what is kept beside the figures of the requests. `check_every`: proves every invariant of the core
    each so many steps (and cheap ones on each).
    Errors: BadInput for a trace, scenario or folder that can't be used; AssertionError from a check that
    fails.
    """
    if not len(trace):
        raise BadInput(f"{trace.name}: the trace has no requests")
    spec = ReplicaSpec.of(scenario, TraceWorkload(trace), costs)
    with replacing(kept.folder) as folder:
        stream = KvEventStream() if kept.kv_events and folder is not None else None
        scheduler = spec.scheduler(log=folder is not None, kv_events=stream, numbered=check_every > 0)
        recorder = Recorder(keep_steps=kept.steps, out=folder, scheduler=scheduler)
        watcher = watch_content(spec, scheduler) if kept.room else None
        served = alone(trace, spec, arrivals(trace), recorder, scheduler, fast_forward=fast_forward)
        if check_every:
            served.replica.observe(Checking(scheduler, check_every))
        started = time.perf_counter()
        run(served.replica.env, progress, lambda: recorder.request_count)
        wall_s = time.perf_counter() - started
        recorder.close()
        served.check_all_ended()
        table = measured(served.requests(), trace)
        figures = summary(trace, [served], table, wall_s)
        if served.revision is not None:
            figures["peak"] = peak_admission(table, spec, recorder.most_requests)
        remarks, pool = notes(trace, [served], table), spec.limits.num_blocks
        left = room_of(spec, scheduler, recorder, watcher)
        result = Result(
            trace.name, scenario, figures, table, recorder.steps(), remarks, pool_blocks=pool, room=left
        )
        if folder is not None:
            save(folder, trace, scenario, spec.costs.name, figures, table)
    if kept.comparisons:
        again = partial(replay, costs=spec.costs, arrivals=arrivals, kept=Kept(steps=False))
        add_comparisons(trace, scenario, result, [served], again, kept.folder)
    return result
