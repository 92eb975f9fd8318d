"""`pagecast serve`: vLLM's interface over the simulator in real time, or over the engine."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pagecast.planner_app import console
from pagecast.planner_app.commands.engine_options import engine_fields, engine_only_options, engine_options
from pagecast.planner_app.commands.field_options import gathering
from pagecast.planner_app.commands.ignored_options import refuse_options
from pagecast.planner_app.commands.mock_options import check_mock_options, mock_options, read_config
from pagecast.planner_app.commands.scenario_options import ScenarioArguments, scenario_from, scenario_options
from pagecast.sim.core.errors import BadInput, CannotRunHere
from pagecast.sim.scenario import Scenario

if TYPE_CHECKING:
    from pagecast.planner_app.server.app import ReplicaServer

Opt = typer.Option


def _server(
    host: Annotated[str, Opt(help="address to listen on; 0.0.0.0 for all")] = "127.0.0.1",
    port: Annotated[int, Opt(min=0, max=65535, help="first port; 0 for any that is free")] = 8000,
    config: Annotated[
        Path | None,
        Opt(help="YAML file of options; the command line wins", callback=read_config, is_eager=True),
    ] = None,
    replicas: Annotated[
        int,
        Opt("--replicas", "--data-parallel-size", min=1, max=256, help="replicas, one port each"),
    ] = 1,
    served_model_name: Annotated[
        list[str] | None, Opt(help="name to serve under, may be repeated [--model]")
    ] = None,
    api_key: Annotated[
        str | None, Opt(help="key that clients must send", envvar="PAGECAST_API_KEY", show_default=False)
    ] = None,
    tokenizer: Annotated[
        Path | None, Opt(help="transformers folder with tokenizer.json [the model's]")
    ] = None,
    lora_modules: Annotated[list[str] | None, Opt(help="adapter as NAME=PATH, may be repeated")] = None,
    max_waiting_queue_length: Annotated[
        int | None, Opt(min=0, help="requests that may wait; others get 429 [no limit]")
    ] = None,
    max_connections: Annotated[int | None, Opt(min=1, help="connections at once; others get 503")] = None,
    max_body_bytes: Annotated[int, Opt(min=1, help="longest body of a request")] = 32 << 20,
    body_timeout: Annotated[float, Opt(min=0.1, help="seconds within which a body must arrive")] = 30.0,
    drain_timeout: Annotated[
        float, Opt(min=0, help="seconds that requests under way have after SIGTERM")
    ] = 60.0,
    record: Annotated[Path | None, Opt(help="folder for a recorded run of what is served")] = None,
    kv_events_endpoint: Annotated[
        str | None, Opt("--kv-events-endpoint", "--zmq-endpoint", help="ZeroMQ endpoint for KV events")
    ] = None,
    kv_events_replay_endpoint: Annotated[
        str | None, Opt(help="ZeroMQ endpoint that sends missed KV events again")
    ] = None,
    kv_events_topic: Annotated[str, Opt(help="topic of KV events")] = "",
    failure_injection_rate: Annotated[
        float, Opt(min=0, max=100, help="percent of requests that fail on purpose")
    ] = 0.0,
    failure_types: Annotated[list[str] | None, Opt(help="failures to inject, may be repeated [all]")] = None,
) -> None:
    """The options of the server, as a signature."""


def _simulated(
    simulate: Annotated[bool, Opt("--simulate", help="serve a simulated replica; needs no GPU")] = False,
    time_scale: Annotated[float | None, Opt(help="simulated seconds in a second [1]")] = None,
    mode: Annotated[
        str | None, Opt(help="text to answer with: random words, or echo the prompt [random]")
    ] = None,
    mean_output_tokens: Annotated[
        int | None, Opt(min=1, help="mean length of answers whose request sets no max_tokens [256]")
    ] = None,
) -> None:
    """The options of the simulated backend, as a signature."""


_SERVER_OPTIONS = list(inspect.signature(_server, eval_str=True).parameters.values())
_SIMULATED_OPTIONS = list(inspect.signature(_simulated, eval_str=True).parameters.values())
_SCENARIO_OPTIONS = scenario_options()


def _values(values: dict[str, Any]) -> dict[str, Any]:
    return values


_ALL = [*_SIMULATED_OPTIONS, *_SERVER_OPTIONS, *mock_options(), *engine_only_options(), *_SCENARIO_OPTIONS]
_gathered = gathering("options", _ALL, _values)


@_gathered
def serve_command(options: dict[str, Any]) -> None:
    """Serves a model behind OpenAI's and vLLM's HTTP interface.

    With --simulate: the scheduler and costs of the simulator on the wall clock. Clients, routers and
    dashboards see the latencies, queues, prefix hits and metrics that the forecast has. Without: the engine,
    on a GPU or the CPU.
    """
    _need_server()
    check_mock_options(options)
    _refuse_ignored(options)
    if not options["simulate"]:
        _serve_engine(options)
        return
    from pagecast.planner_app.server.running import announce, listen, serve

    replicas = _simulated_replicas(options)
    server_options = replicas[0].options
    sockets = listen(server_options, len(replicas))
    serve(replicas, sockets, lambda ports: announce(server_options, ports))


def _refuse_ignored(options: dict[str, Any]) -> None:
    """Errors: BadInput for an option that what is served does not look at."""
    if options["simulate"]:
        engine_only = [one.name for one in engine_only_options()]
        refuse_options(_given(options, engine_only), "is for the engine: leave it out, or --simulate")
    else:
        known = {"model", "seed", *engine_fields()}
        simulated = [one.name for one in _SIMULATED_OPTIONS if one.name != "simulate"]
        simulated += [one.name for one in _SCENARIO_OPTIONS if one.name not in known]
        refuse_options(
            _given(options, [*simulated, "lora_modules"]),
            "needs --simulate: the engine has nothing like it; leave it out",
        )
    if options["kv_events_endpoint"] is None:
        of_events = ["kv_events_replay_endpoint", "kv_events_topic", "event_batch_size"]
        refuse_options(_given(options, of_events), "is for KV events: give --kv-events-endpoint as well")


def _given(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Values by the options' names without dashes, None for those that are not given."""
    values = {name.replace("_", "-"): options[name] for name in names}
    return {name: None if value in ("", []) else value for name, value in values.items()}


def _simulated_replicas(options: dict[str, Any]) -> list[ReplicaServer]:
    from pagecast.planner_app.server.answers import Lengths
    from pagecast.planner_app.server.building import Simulation, simulated_replica
    from pagecast.planner_app.server.tokenizer import tokenizer_for

    fields = {name: options[name] for name in Scenario.flat_fields() if options[name] is not None}
    scenario = scenario_from(ScenarioArguments(options["scenario"], fields))
    paced = {name: options[name] for name in ("time_scale", "mode") if options[name] is not None}
    mean = options["mean_output_tokens"]
    simulation = Simulation(**paced, lengths=Lengths() if mean is None else Lengths(mean))
    simulation.check()
    server = _server_options(options, scenario.model, scenario.seed)
    tokenizer = tokenizer_for(scenario.model, options["tokenizer"])
    costs = scenario.step_costs()
    replicas = []
    for number in range(options["replicas"]):
        replicas.append(simulated_replica(scenario, costs, tokenizer, server, simulation, number))
    return replicas


def _serve_engine(options: dict[str, Any]) -> None:
    if options["replicas"] > 1:
        raise BadInput("--replicas needs --simulate: the engine has one GPU")
    if options["model"] is None:
        raise BadInput("name a --model to serve, or give --simulate to serve its forecast")
    from pagecast.planner_app.commands.engine import memory_table, open_engine
    from pagecast.planner_app.server.running import listen

    server = _server_options(options, options["model"], options["seed"] or 0)
    sockets = listen(server, 1)
    events = server.kv_events_endpoint is not None
    with open_engine(options["model"], engine_options(options), log_events=events) as engine:
        from pagecast.planner_app.server.building_engine import engine_facts, engine_work
        from pagecast.planner_app.server.engine_front import serve_engine
        from pagecast.planner_app.server.engine_mail import mail_sockets

        console.err.print(memory_table(engine.loaded.memory))
        engine.warm_up()
        ours, theirs = mail_sockets()
        work = engine_work(engine, server, ours)
        serve_engine(work, engine_facts(engine), theirs, options["tokenizer"], server, sockets)


def _server_options(options: dict[str, Any], model: str, seed: int) -> Any:
    from pagecast.planner_app.server.options import FAILURES, ServerOptions

    server = ServerOptions(
        model=model,
        served_model_name=tuple(options["served_model_name"] or ()),
        host=options["host"],
        port=options["port"],
        replicas=options["replicas"],
        api_key=options["api_key"] or os.environ.get("VLLM_API_KEY"),
        lora_modules=tuple(options["lora_modules"] or ()),
        max_loras=options["max_loras"] or 1,
        max_waiting_queue_length=options["max_waiting_queue_length"],
        max_connections=options["max_connections"],
        max_body_bytes=options["max_body_bytes"],
        body_timeout_s=options["body_timeout"],
        drain_timeout_s=options["drain_timeout"],
        failure_injection_rate=options["failure_injection_rate"],
        failure_types=tuple(options["failure_types"] or FAILURES),
        seed=seed,
        record=options["record"],
        kv_events_endpoint=options["kv_events_endpoint"],
        kv_events_replay_endpoint=options["kv_events_replay_endpoint"],
        kv_events_topic=options["kv_events_topic"],
        kv_events_batch=options["event_batch_size"],
    )
    server.check()
    return server


def _need_server() -> None:
    missing = [
        name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise CannotRunHere(f"the server needs {missing[0]}; install it with pip install 'pagecast[serve]'")
