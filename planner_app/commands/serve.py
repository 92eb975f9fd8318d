"""`pagecast serve`: vLLM's interface over the simulator in real time, or over the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.engine_options import (
    EngineOnly,
    EngineOptions,
    engine_fields,
    engine_options,
)
from pagecast.planner_app.commands.field_options import with_options
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.mock_options import MockOptions, Refused, read_config, with_mock_options
from pagecast.planner_app.commands.scenario_options import GivenScenario, ScenarioOnly, started
from pagecast.planner_app.server.options import ServeOptions, Simulation
from pagecast.sim.core.errors import BadInput, CannotRunHere

if TYPE_CHECKING:
    from pagecast.planner_app.server.app import ReplicaServer

Config = Annotated[
    Path | None,
    typer.Option(help="YAML file of options; the command line wins", callback=read_config, is_eager=True),
]


@with_options
def serve_command(
    *,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="serve a simulated replica; needs no GPU")
    ] = False,
    pace: Simulation,
    config: Config = None,
    server: ServeOptions,
    mock: MockOptions,
    refused: Refused,
    engine: EngineOnly,
    arguments: ScenarioOnly,
) -> None:
    """Serves a model behind OpenAI's and vLLM's HTTP interface.

    With --simulate: the scheduler and costs of the simulator on the wall clock. Clients, routers and
    dashboards see the latencies, queues, prefix hits and metrics that the forecast has. Without: the engine,
    on a GPU or the CPU.
    """
    _need_server()
    arguments = with_mock_options(arguments, mock)
    if simulate:
        refuse_options(
            {name.replace("_", "-"): value for name, value in engine.items()},
            "is for the engine: leave it out, or --simulate",
        )
    else:
        _refuse_simulated(pace, server, arguments)
    if server.kv_events_endpoint is None:
        of_events = ("kv_events_replay_endpoint", "kv_events_topic", "event_batch_size")
        given = {name.replace("_", "-"): getattr(server, name) or None for name in of_events}
        refuse_options(given, "is for KV events: give --kv-events-endpoint as well")
    if not simulate:
        _serve_engine(engine, server, arguments)
        return
    from pagecast.planner_app.server.running import announce, listen, serve

    replicas = _simulated_replicas(arguments, server, pace)
    options = replicas[0].options
    sockets = listen(options, len(replicas))
    serve(replicas, sockets, lambda ports: announce(options, ports))


def _refuse_simulated(pace: Simulation, server: ServeOptions, arguments: GivenScenario) -> None:
    """Errors: BadInput for an option that the engine does not look at."""
    reason = "needs --simulate: the engine has nothing like it; leave it out"
    refuse_options(pace, reason)
    known = {"model", "seed", *engine_fields()}
    given = {
        "scenario": arguments.scenario,
        "launch": arguments.launch,
        **arguments.fields,
        "lora_modules": server.lora_modules or None,
    }
    refuse_options(
        {name.replace("_", "-"): value for name, value in given.items() if name not in known}, reason
    )


def _simulated_replicas(
    arguments: GivenScenario, options: ServeOptions, pace: Simulation
) -> list[ReplicaServer]:
    from pagecast.planner_app.server.building import simulated_replica
    from pagecast.planner_app.server.tokenizer import tokenizer_for

    scenario, notes = started(arguments)
    for note in notes:
        console.err.print(note, markup=False)
    options = options.of(scenario.model, scenario.seed)
    tokenizer = tokenizer_for(scenario.model, options.tokenizer)
    costs = scenario.step_costs()
    return [
        simulated_replica(scenario, costs, tokenizer, options, pace, number)
        for number in range(options.replicas)
    ]


def _serve_engine(engine: EngineOptions, options: ServeOptions, arguments: GivenScenario) -> None:
    if options.replicas > 1:
        raise BadInput("--replicas needs --simulate: the engine has one GPU")
    fields = arguments.fields
    if "model" not in fields:
        raise BadInput("name a --model to serve, or give --simulate to serve its forecast")
    from pagecast.planner_app.commands.engine import memory_table, open_engine
    from pagecast.planner_app.server.running import listen

    options = options.of(fields["model"], fields.get("seed", 0))
    sockets = listen(options, 1)
    events = options.kv_events_endpoint is not None
    with open_engine(options.model, engine_options({**engine, **fields}), log_events=events) as running:
        from pagecast.planner_app.server.building_engine import engine_facts, engine_work
        from pagecast.planner_app.server.engine_front import serve_engine
        from pagecast.planner_app.server.engine_mail import mail_sockets

        console.err.print(memory_table(running.loaded.memory))
        running.warm_up()
        ours, theirs = mail_sockets()
        work = engine_work(running, options, ours)
        serve_engine(work, engine_facts(running), theirs, options, sockets)


def _need_server() -> None:
    missing = [
        name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise CannotRunHere(f"the server needs {missing[0]}; install it with pip install 'pagecast[serve]'")
