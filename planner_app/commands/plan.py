"""`pagecast plan`: how many requests at once, and how many per second, keep an SLO."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.fleet_options import FleetOptions
from pagecast.planner_app.commands.ignored_options import (
    refuse_options,
    refuse_set_twice,
    refuse_without_draws,
)
from pagecast.planner_app.commands.output import Explained, Reported
from pagecast.planner_app.commands.plan_view import show, show_answer, without_reuse_line
from pagecast.planner_app.commands.scenario_options import WorkArguments, load
from pagecast.planner_app.planner.capacity.options import CompareOptions, PlanOptions, Target
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.fleet.options import Emitted, SizeOptions
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.traces.shared_prefix import without_reuse

if TYPE_CHECKING:
    from pagecast.planner_app.planner.capacity.planning import CapacityPlan
    from pagecast.sim.fleet.settings import FleetSettings
    from pagecast.sim.scenario import Scenario
    from pagecast.traces.schema import Trace

_MOST_FLEET_REQUESTS = 40_000
_OF_CLIENTS = ("concurrency", "concurrency_ramp", "repeat_prompts", "warmup")


@with_options
def plan_command(
    arguments: WorkArguments,
    fleet: FleetOptions,
    sizing: SizeOptions,
    ask: PlanOptions,
    others: CompareOptions,
    many: Many,
    output: Reported,
) -> None:
    """Finds the admissible concurrency and the highest request rate at which TRACE keeps an SLO.

    Admissible are as many users as may each send their next request when the last has ended. The rate is of
    the trace's own arrivals, closer together, and one that the server keeps up with for good: the trace is
    played over and over. Exit code 1 where not even the least load keeps the SLO, 2 where no request of the
    trace can be served.

    With a fleet's options (--router, --fleet), --against or --emit it finds the fewest replicas that keep the
    SLO for TRACE at its own times instead; with --rate, for TRACE at that rate, repeated until it lasts.

    With --compare it plans for several servers, and shows them in one table: the cheapest first with --price.
    """
    from pagecast.planner_app.planner.capacity.users import at_rate, lasting_at
    from pagecast.planner_app.planner.slo import Slo

    Slo.parse(ask.slo)
    for_fleet = fleet.any or bool(sizing.against) or sizing.emit is not None
    if for_fleet:
        refuse_options({"replicas": fleet.replicas}, "is what plan finds, for a --router NAME: leave it out")
        reason = "is for one replica: leave it out, or leave the fleet's options, --against and --emit out"
        refuse_options(others, reason)
        refuse_options(ask, reason, beyond=Target)
        refuse_options({"report": output.report}, reason)
    else:
        refuse_options(sizing, "is for a fleet: give --router NAME as well", beyond=Emitted)
        refuse_without_draws(ask)
        refuse_options(
            {name.replace("_", "-"): getattr(arguments.load, name) for name in _OF_CLIENTS},
            "says how many requests are sent at a time, which plan looks for: leave it out",
        )
    if others.compare:
        refuse_options(output, "is of one plan: leave it or --compare out", beyond=Explained)
        refuse_set_twice("--compare", others.compare, arguments.fields)
    sizing.check()
    if output.report is not None:
        ready("--report", output.report)
    reach = partial(lasting_at, most_requests=_MOST_FLEET_REQUESTS) if for_fleet else at_rate
    work, scenario = load(arguments, reach=reach)
    if for_fleet:
        from pagecast.planner_app.commands.fleet_plan import plan_fleet

        settings = _priced_fleet(fleet.settings(), scenario, ask)
        plan_fleet(work, scenario, settings, ask, sizing, many, output)
        return
    if others.compare:
        from pagecast.planner_app.commands.plan_compare import plan_compared

        plan_compared(work, scenario, ask, others, many, output)
        return
    result = _plan_replica(work, scenario, ask, many)
    if arguments.load.request_rate is not None:
        note = "--request-rate is only what `take N` is for: plan looks for the highest rate itself"
        result = replace(result, notes=(note, *result.notes))
    unshared = None
    if work.assumed_reuse is not None and result.complete:
        ask = ask.model_copy(update={"replicates": 0, "explain": False})
        unshared = _plan_replica(without_reuse(work), scenario, ask, many)
    _tell(work, result, output, unshared)
    if not result.complete:
        raise typer.Exit(130)
    if any(answer.value is None for answer in result.answers.values()):
        raise typer.Exit(1)


def _priced_fleet(settings: FleetSettings, scenario: Scenario, ask: Target) -> FleetSettings:
    """The fleet with the price of its GPU, where one is given. Errors: BadInput."""
    from pagecast.planner_app.planner.prices import priced
    from pagecast.sim.machine.gpus import gpu as find_gpu

    if not ask.price:
        return settings
    gpu = find_gpu(settings.groups[0].scenario.get("gpu", scenario.gpu)).name
    return settings.model_copy(update={"price_per_gpu_hour": priced(ask.price, [gpu])[gpu]})


def _plan_replica(work: Trace, scenario: Scenario, ask: PlanOptions, many: Many) -> CapacityPlan:
    """Plans for one replica, with a bar that shows how far the searches are. Errors: BadInput."""
    from pagecast.planner_app.planner.capacity.planning import plan, steps
    from pagecast.planner_app.planner.execution.executor import executor

    total = steps(2 if ask.think_time is None else 3, ask.replicates)
    if not ask.replicates and many == Many():
        many = Many(workers=1)  # more would take as long to start as the few replays beside the highest rate
    with executor(many) as run, console.progress("replays", total) as update:
        return plan(work, scenario, ask, run=run, progress=update)


def _tell(work: Trace, result: CapacityPlan, output: Reported, unshared: CapacityPlan | None) -> None:
    """Writes the report, where there is one, and prints the plan."""
    report = output.report
    if report is not None:
        from pagecast.planner_app.reports.plan_report import plan_report

        write(report, plan_report(result))
    if output.json_only:
        other = {} if unshared is None else {"without_reuse": unshared.to_dict()}
        console.print_json({**result.to_dict(), **other})
        return
    if output.explain:
        show(result)
        if unshared is not None:
            console.out.print(without_reuse_line(unshared), soft_wrap=True)
    else:
        show_answer(work, result, unshared)
    if report is not None:
        console.out.print(f"written to {report}", soft_wrap=True)
