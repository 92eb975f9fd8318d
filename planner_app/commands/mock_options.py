"""Options of llm-d-inference-sim, the mock server that people come from, beyond those that `serve` shares.

What means something here is taken; what would replace the scheduler's times or state by constants is refused,
with what to use in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import typer
from pagecast.planner_app.commands.field_options import Gather, parameter
from pagecast.planner_app.commands.scenario_options import GivenScenario
from pagecast.planner_app.options import Flag, Options
from pagecast.sim.core.errors import BadInput
from pagecast.sim.yaml_documents import read_mapping
from pydantic import Field

Opt = typer.Option
_TIMES = "times are those of the scheduler and the step costs; choose --gpu, --model, --costs or --time-scale"
_LINKS = "KV transfers are simulated; give the host link by --host-load-gb-per-s and --host-latency-ms"
_TEXT = "texts are made up and have no influence on times; leave it out, or use --mode echo"
REFUSED = {
    "time_to_first_token": _TIMES,
    "time_to_first_token_std_dev": _TIMES,
    "inter_token_latency": _TIMES,
    "inter_token_latency_std_dev": _TIMES,
    "prefill_overhead": _TIMES,
    "prefill_time_per_token": _TIMES,
    "prefill_time_std_dev": _TIMES,
    "time_factor_under_load": _TIMES,
    "latency_calculator": _TIMES,
    "kv_cache_transfer_latency": _LINKS,
    "kv_cache_transfer_latency_std_dev": _LINKS,
    "kv_cache_transfer_time_per_token": _LINKS,
    "kv_cache_transfer_time_std_dev": _LINKS,
    "fake_metrics": "metrics are those of the simulated scheduler; leave it out",
    "hash_seed": "names of blocks are of their content alone, the same in all replicas; leave it out",
    "dataset_path": _TEXT,
    "dataset_url": _TEXT,
}


class MockOptions(Options):
    """Options that are taken, and mean something else here."""

    kv_cache_size: Annotated[int | None, Flag(hidden=True)] = Field(
        default=None, ge=1, description="the same as --num-gpu-blocks"
    )
    enable_kvcache: Annotated[bool, Flag(hidden=True)] = Field(
        default=True, description="there is always a KV cache"
    )


def _refused(given: dict[str, Any]) -> None:
    for name in given:
        raise BadInput(f"--{name.replace('_', '-')} is not served here: {REFUSED[name]}")


Refused = Annotated[
    None, Gather([parameter(name, str | None, Opt(hidden=True), None) for name in REFUSED], _refused)
]
"""The options that are refused with the reason; they are not in the help."""


def with_mock_options(arguments: GivenScenario, mock: MockOptions) -> GivenScenario:
    """Takes over what has another name here. Errors: BadInput."""
    if not mock.enable_kvcache:
        raise BadInput("--no-enable-kvcache: there is always a KV cache; use --no-enable-prefix-caching")
    size = mock.kv_cache_size
    if size is None:
        return arguments
    if arguments.fields.get("num_gpu_blocks", size) != size:
        raise BadInput("--kv-cache-size and --num-gpu-blocks are the same; give one of them")
    return replace(arguments, fields={**arguments.fields, "num_gpu_blocks": size})


def read_config(context: Any, path: Any) -> Any:
    """Callback of `--config`: the file's entries are defaults of the options with their names.

    An entry has any name that the command line takes, with `-` or `_`, and `no-...: true` turns a switch off.
    Errors: BadInput naming the file, and an entry that is no option, or that says an option again.
    """
    if path is None:
        return None
    switches = _switches(context.command.params)
    entries: dict[str, Any] = {}
    for text, value in read_mapping(path, "give a YAML file of options").items():
        switch = switches.get(_plain(str(text)))
        if switch is None:
            raise BadInput(f"{path}: {text!r} is no option of `pagecast serve`; see pagecast serve --help")
        if switch.option in entries:
            raise BadInput(f"{path}: {text!r} says again what another entry says; leave one of them out")
        if switch.off:
            if not isinstance(value, bool):
                raise BadInput(f"{path}: {text}: {value!r} is neither true nor false")
            value = not value
        entries[switch.option] = value
    context.default_map = {**(context.default_map or {}), **entries}
    return path


class _Switch(NamedTuple):
    """The option that a name stands for, and whether the name turns it off."""

    option: str
    off: bool


def _switches(options: Iterable[Any]) -> dict[str, _Switch]:
    """Every name that the command line has for an option."""
    names: dict[str, _Switch] = {}
    for option in options:
        names |= {_plain(name): _Switch(option.name, True) for name in option.secondary_opts}
        names |= {_plain(name): _Switch(option.name, False) for name in (option.name, *option.opts)}
    return names


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
