"""`pagecast plan`: how many requests at once, and how many per second, keep an SLO."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.bounds import MOST_REPLICATES, MOST_WORKERS
from pagecast.planner_app.commands.fleet_options import FleetGiven, with_fleet
from pagecast.planner_app.commands.ignored_options import WITHOUT_DRAWS, refuse_options
from pagecast.planner_app.commands.scenario_options import (
    ScenarioArguments,
    TraceArgument,
    load,
    with_scenario,
)
from pagecast.planner_app.reports.html_page import ready, write
from rich.table import Table

if TYPE_CHECKING:
    from pagecast.planner_app.planner.capacity.envelope import Envelope
    from pagecast.planner_app.planner.capacity.planning import Answer, CapacityPlan
    from pagecast.planner_app.planner.slo import Slo
    from pagecast.sim.fleet.settings import FleetSettings
    from pagecast.sim.scenario import Scenario
    from pagecast.traces.schema import Trace

Opt = typer.Option
_MOST_REPLICAS = 64
_MOST_PREEMPTIONS = 0.01
_MOST_REQUESTS = 4000
_MOST_FLEET_REQUESTS = 40_000
_REPLICATES = 5
_TITLES = {
    "concurrency": "admissible concurrency",
    "rate": "highest request rate",
    "users": "users who think",
}


@with_fleet
@with_scenario
def plan_command(
    trace: TraceArgument,
    slo: Annotated[
        str,
        Opt(
            help="SLO: ttft_p99<2s,tpot_p95<50ms,goodput(ttft<2s,tpot<50ms)>0.99; "
            "TTFT, E2E and queue of a request that is not served are infinite"
        ),
    ],
    arguments: ScenarioArguments,
    fleet: FleetGiven,
    against: Annotated[
        list[str] | None, Opt(help="another router to compare with, with a fleet's options")
    ] = None,
    most_replicas: Annotated[
        int | None,
        Opt(min=1, max=4096, help=f"with a fleet, replicas at which it is given up [{_MOST_REPLICAS}]"),
    ] = None,
    emit: Annotated[
        str | None, Opt(help="write the fewest replicas as vllm, k8s, llm-d or dynamo would start them")
    ] = None,
    out: Annotated[Path | None, Opt(help="file for --emit [printed]")] = None,
    think_time: Annotated[
        float | None,
        Opt(min=0, help="plan also for users who pause this many seconds (mean) before a session"),
    ] = None,
    replicas_for: Annotated[
        float | None, Opt(help="request rate per second for the number of replicas [the trace's own]")
    ] = None,
    price: Annotated[
        list[str] | None, Opt(help="GPU=USD per GPU-hour: H200=3.5; no price is built in")
    ] = None,
    max_preemption_rate: Annotated[
        float | None,
        Opt(min=0, help=f"most preemptions per request at the admissible concurrency [{_MOST_PREEMPTIONS}]"),
    ] = None,
    most_users: Annotated[
        int | None, Opt(min=1, help="users at which a search gives up [4 times --max-num-seqs]")
    ] = None,
    most_requests: Annotated[
        int | None,
        Opt(
            min=1,
            help="requests of a replay: longer traces are cut; the highest rate takes 6 times that "
            f"[{_MOST_REQUESTS}]",
        ),
    ] = None,
    replicates: Annotated[
        int | None,
        Opt(
            min=0,
            max=MOST_REPLICATES,
            help="draws of costs, noise and workload for 90% intervals: 20 for better ones, 0 for none "
            f"[{_REPLICATES}]",
        ),
    ] = None,
    fixed_workload: Annotated[
        bool, Opt("--fixed-workload", help="leave the workload's uncertainty out of the intervals")
    ] = False,
    workers: Annotated[int | None, Opt(min=1, max=MOST_WORKERS, help="processes [one per core]")] = None,
    cluster: Annotated[str | None, Opt(help="address of a Dask scheduler: tcp://host:8786")] = None,
    report: Annotated[Path | None, Opt(help="HTML file with charts to write")] = None,
    json: Annotated[bool, Opt("--json", help="print one JSON object and nothing else")] = False,
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

    level = Slo.parse(slo)
    for_fleet = fleet.any or bool(against) or emit is not None
    if for_fleet:
        refuse_options({"replicas": fleet.replicas}, "is what plan finds, for a --router NAME: leave it out")
        refuse_options(
            {
                "think-time": think_time,
                "replicas-for": replicas_for,
                "max-preemption-rate": max_preemption_rate,
                "most-users": most_users,
                "most-requests": most_requests,
                "replicates": replicates,
                "fixed-workload": fixed_workload or None,
                "report": report,
            },
            "is for one replica: leave it out, or leave the fleet's options, --against and --emit out",
        )
    else:
        refuse_options({"most-replicas": most_replicas}, "is for a fleet: give --router NAME as well")
        if replicates == 0:
            refuse_options({"fixed-workload": fixed_workload or None}, WITHOUT_DRAWS)
    if emit is None:
        refuse_options({"out": out}, "is the file for --emit: give --emit FORM as well")
    if report is not None:
        ready("--report", report)
    reach = partial(lasting_at, most_requests=_MOST_FLEET_REQUESTS) if for_fleet else at_rate
    work, scenario = load(trace, arguments, reach=reach)
    if for_fleet:
        from pagecast.planner_app.commands.fleet_plan import plan_fleet

        plan_fleet(
            work,
            scenario,
            _priced_fleet(fleet.settings(), scenario, price),
            level,
            routers=against or [],
            most=_MOST_REPLICAS if most_replicas is None else most_replicas,
            workers=workers,
            cluster=cluster,
            form=emit,
            out=out,
            json=json,
        )
        return
    result = _plan_replica(
        work,
        scenario,
        level,
        price or [],
        _REPLICATES if replicates is None else replicates,
        workers,
        cluster,
        think_s=think_time,
        replicas_for=replicas_for,
        max_preemption_rate=_MOST_PREEMPTIONS if max_preemption_rate is None else max_preemption_rate,
        most_users=most_users,
        most_requests=_MOST_REQUESTS if most_requests is None else most_requests,
        fixed_workload=fixed_workload,
    )
    _tell(result, report, json=json)
    if any(answer.value is None for answer in result.answers.values()):
        raise typer.Exit(1)


def _priced_fleet(settings: FleetSettings, scenario: Scenario, price: list[str] | None) -> FleetSettings:
    """The fleet with the price of its GPU, where one is given. Errors: BadInput."""
    from pagecast.planner_app.planner.prices import priced, read_prices
    from pagecast.sim.machine.gpus import gpu as find_gpu

    if not price:
        return settings
    gpu = find_gpu(settings.groups[0].scenario.get("gpu", scenario.gpu)).name
    prices = priced(read_prices(price), [gpu])
    return settings.model_copy(update={"price_per_gpu_hour": prices[gpu]})


def _plan_replica(
    work: Trace,
    scenario: Scenario,
    level: Slo,
    price: list[str],
    draws: int,
    workers: int | None,
    cluster: str | None,
    *,
    think_s: float | None,
    replicas_for: float | None,
    max_preemption_rate: float,
    most_users: int | None,
    most_requests: int,
    fixed_workload: bool,
) -> CapacityPlan:
    """Plans for one replica, with a bar that shows how far the searches are. Errors: BadInput."""
    from pagecast.planner_app.planner.capacity.planning import plan, steps
    from pagecast.planner_app.planner.execution.executor import executor
    from pagecast.planner_app.planner.prices import priced, read_prices
    from pagecast.sim.machine.gpus import gpu as find_gpu
    from pagecast.sim.replay.resample import resample

    gpu = find_gpu(scenario.gpu).name
    prices = priced(read_prices(price), [gpu])
    total = steps(2 if think_s is None else 3, draws)
    with executor(workers, cluster) as run, console.progress("searches", total) as update:
        return plan(
            work,
            scenario,
            level,
            think_s=think_s,
            replicas_for=replicas_for,
            max_preemption_rate=max_preemption_rate,
            most_users=most_users,
            most_requests=most_requests,
            replicates=draws,
            workload=None if fixed_workload else resample,
            usd_per_gpu_hour=prices.get(gpu),
            run=run,
            progress=update,
        )


def _tell(result: CapacityPlan, report: Path | None, *, json: bool) -> None:
    """Writes the report, where there is one, and prints the plan."""
    if report is not None:
        from pagecast.planner_app.reports.plan_report import plan_report

        write(report, plan_report(result))
    if json:
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
        f"{scenario.tensor_parallel_size} x {scenario.gpu}, profile {scenario.profile}, costs {result.costs}",
        soft_wrap=True,
    )
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
