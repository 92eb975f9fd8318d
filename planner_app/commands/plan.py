"""`pagecast plan`: how many requests at once, and how many per second, keep an SLO."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.fleet_options import FleetOptions
from pagecast.planner_app.commands.ignored_options import refuse_options, refuse_without_draws
from pagecast.planner_app.commands.output import Output, Reported
from pagecast.planner_app.commands.scenario_options import WorkArguments, load
from pagecast.planner_app.planner.capacity.options import PlanOptions, Target
from pagecast.planner_app.planner.execution.options import Many
from pagecast.planner_app.planner.fleet.options import Emitted, SizeOptions
from pagecast.planner_app.reports.html_page import ready, write
from pagecast.planner_app.wording.engine_defaults import engine_defaults
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.capacity.envelope import Envelope
    from pagecast.planner_app.planner.capacity.planning import Answer, CapacityPlan
    from pagecast.sim.fleet.settings import FleetSettings
    from pagecast.sim.scenario import Scenario
    from pagecast.traces.schema import Trace

_MOST_FLEET_REQUESTS = 40_000
_OF_CLIENTS = ("concurrency", "concurrency_ramp", "repeat_prompts", "warmup")
_TITLES = {
    "concurrency": "admissible concurrency",
    "rate": "highest request rate",
    "users": "users who think",
}


@with_options
def plan_command(
    arguments: WorkArguments,
    fleet: FleetOptions,
    sizing: SizeOptions,
    ask: PlanOptions,
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
    """
    from pagecast.planner_app.planner.capacity.users import at_rate, lasting_at
    from pagecast.planner_app.planner.slo import Slo

    Slo.parse(ask.slo)
    for_fleet = fleet.any or bool(sizing.against) or sizing.emit is not None
    if for_fleet:
        refuse_options({"replicas": fleet.replicas}, "is what plan finds, for a --router NAME: leave it out")
        reason = "is for one replica: leave it out, or leave the fleet's options, --against and --emit out"
        refuse_options(ask, reason, beyond=Target)
        refuse_options(output, reason, beyond=Output)
    else:
        refuse_options(sizing, "is for a fleet: give --router NAME as well", beyond=Emitted)
        refuse_without_draws(ask)
        refuse_options(
            {name.replace("_", "-"): getattr(arguments.load, name) for name in _OF_CLIENTS},
            "says how many requests are sent at a time, which plan looks for: leave it out",
        )
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
    result = _plan_replica(work, scenario, ask, many)
    _tell(result, output)
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
    with executor(many) as run, console.progress("searches", total) as update:
        return plan(work, scenario, ask, run=run, progress=update)


def _tell(result: CapacityPlan, output: Reported) -> None:
    """Writes the report, where there is one, and prints the plan."""
    report = output.report
    if report is not None:
        from pagecast.planner_app.reports.plan_report import plan_report

        write(report, plan_report(result))
    if output.json_only:
        console.print_json(result.to_dict())
        return
    show(result)
    if report is not None:
        console.out.print(f"written to {report}", soft_wrap=True)


def show(result: CapacityPlan) -> None:
    """Prints the answers, what breaks beyond them, what binds, and the envelope."""
    scenario = result.scenario
    console.out.print(
        f"{result.trace}: {result.requests:,} requests on {scenario.model}, "
        f"{scenario.tensor_parallel_size} x {scenario.gpu}, {scenario.profile.label}, costs {result.costs}",
        soft_wrap=True,
    )
    if defaults := engine_defaults(scenario):
        console.out.print(defaults, soft_wrap=True)
    console.out.print(f"SLO: {result.slo.text}", soft_wrap=True)
    if result.rejects:
        console.out.print(result.rejects, soft_wrap=True)
    if any(answer.value is not None for answer in result.answers.values()):
        console.out.print(_table(result))
    if result.replicas is not None:
        spread = "if sessions are spread evenly and each keeps to its replica"
        console.out.print(f"replicas: {result.replicas.sentence}, {spread}", soft_wrap=True)
    if result.cost is not None:
        console.out.print(f"cost: {result.cost.sentence}", soft_wrap=True)
    for answer in result.answers.values():
        for line in _lines(answer):
            console.out.print(line, soft_wrap=True)
    console.out.print(_envelope(result.envelope), soft_wrap=True)
    for note in result.notes:
        console.out.print(f"note: {note}", soft_wrap=True)
    console.out.print(f"planned in {result.wall_s:.1f} s with {result.replays:,} replays", soft_wrap=True)


def _table(result: CapacityPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    draws = max(answer.draws for answer in result.answers.values())
    span = f"90%, {draws} draws" if draws else "90% interval"
    for title in ("", "most", span, "output tokens/s", "binds"):
        table.add_column(title, justify="left" if title in ("", "binds") else "right", no_wrap=True)
    for answer in result.answers.values():
        title = _TITLES[answer.kind]
        if answer.value is None or answer.at is None:
            table.add_row(title, "none")
            continue
        unit = "/s" if answer.kind == "rate" else ""
        span = (
            ""
            if answer.low is None or answer.high is None
            else (f"{_number(answer.low)} to {_number(answer.high)}")
        )
        limit = answer.binding.limit if answer.binding else "-"
        output = f"{answer.at.output_tokens_per_s:,.0f}"
        table.add_row(title, f"{_number(answer.value)}{unit}", span, output, limit)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value.is_integer() else f"{value:.3g}"


def _lines(answer: Answer) -> list[str]:
    """Lines that explain an answer: the SLO at it, terms that break above it, and the limit that binds."""
    from pagecast.planner_app.planner.capacity.planning import judgment, shown

    title = _TITLES[answer.kind]
    if answer.value is None or answer.at is None:
        return [f"{title}: none; {answer.sentence}"]
    lines = [f"{title}: at {shown(answer.kind, answer.value)} {', '.join(map(judgment, answer.at.terms))}"]
    if answer.at.counts.sentence:
        lines.append(f"  {answer.at.counts.sentence}")
    if answer.sentence:
        lines.append(f"  {answer.sentence}")
    if answer.beyond is not None:
        broken = " and ".join(
            f"{judgment(term)}, not {_bound_of(term.text)}" for term in answer.beyond.broken
        )
        counts = answer.beyond.counts.sentence
        lines.append(
            f"  at {shown(answer.kind, answer.beyond.amount)} {broken}" + (f": {counts}" if counts else "")
        )
    if answer.binding is not None:
        lines.append(f"  {answer.binding.sentence}")
        full = answer.binding.full
        lines.append(
            f"  at that load the batch is full {full['batch']:.0%} of the time, the token budget "
            f"{full['budget']:.0%}, requests wait for KV blocks {full['kv']:.0%}; "
            f"{full['kv_used']:.0%} of KV is in use"
        )
    return lines


def _bound_of(term: str) -> str:
    """The bound of a term: `<2s`, `>0.99`."""
    tail = term.rpartition(")")[2]
    return tail[min(at for at in (tail.find("<"), tail.find(">")) if at >= 0) :]


def _envelope(fits: Envelope) -> str:
    limits = ", ".join(f"{name} {value:,}" for name, value in fits.limits.items())
    alone = f"; by KV blocks {fits.hbm:,} if nothing is shared" if fits.hbm != fits.hbm_shared else ""
    return (
        f"static envelope: {fits.concurrency:,} requests at once by arithmetic ({limits}{alone}); "
        f"{fits.pool_blocks:,} KV blocks, {fits.blocks.mean:,.0f} in use by a request on average, "
        f"{fits.blocks.most:,} at most"
    )
