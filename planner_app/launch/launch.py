"""A launch: the scenario that a start of an engine stands for.

launch = read_launch("vllm serve Qwen/Qwen3-8B --max-num-seqs 64")
Scenario.make(launch.fields)
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pagecast.planner_app.launch import sglang, trtllm, vllm
from pagecast.planner_app.launch.manifests import starts_in
from pagecast.planner_app.launch.options import TITLES, Given, from_mapping, parse
from pagecast.planner_app.launch.reading import Reading
from pagecast.planner_app.launch.starts import Start, starts_of
from pagecast.sim.core.engines.registry import nearest, profile
from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import MIB, read_text
from pagecast.sim.machine.gpus import gpu as find_gpu
from pagecast.sim.machine.models import model as find_model
from pagecast.sim.yaml_documents import parse_yaml, read_mapping

_READ: dict[str, Callable[[Reading], None]] = {
    "vllm": vllm.read,
    "sglang": sglang.read,
    "trtllm": trtllm.read,
}
_FORMS = (
    "vllm serve, python -m vllm.entrypoints.openai.api_server, sglang serve, python -m sglang.launch_server, "
    "trtllm-serve, docker run, or a manifest (@FILE.yaml)"
)
_MANIFESTS = (".yaml", ".yml", ".json")
_MOST_BYTES = MIB
_REMEDY = "give @FILE with a start script or a manifest"
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)(/|$)")
_QUIET = re.compile(
    r"(VLLM|SGLANG|SGL|TRTLLM|TLLM|NCCL)_.*(LOG|HOST|PORT|API_KEY|CACHE_ROOT|TELEMETRY|USAGE|DEBUG|CONFIG_ROOT|"
    r"TIMEOUT|IMAGE|VERSION|DISABLE_GC|MODEL|NO_STATS|TRACE|INTERFACE|SOCKET|IFNAME).*"
)
_ENGINE_VARIABLE = re.compile(r"(VLLM|SGLANG|SGL|TRTLLM|TLLM|NCCL)_[A-Z0-9_]+")


@dataclass(frozen=True)
class Launch:
    """What a start of an engine says.

    `version`: as rules have it; None where no image and no pin tells. `fields`: a scenario's, those given
    alone. `gpus`: what the engine takes. `replicas`: equal starts.
    """

    where: str
    engine: str
    version: str | None
    fields: dict[str, Any]
    gpus: int
    replicas: int
    notes: tuple[str, ...]
    command: str

    @property
    def title(self) -> str:
        """Engine and version, as `vllm@0.33`."""
        return self.engine + (f"@{self.version}" if self.version else "")


def read_launch(given: str) -> Launch:
    """Reads a command, or the file `@PATH` (`@PATH#NAME`: one of several containers). Errors: BadInput."""
    if not given.startswith("@"):
        return _one(starts_of(given, "--launch"), "--launch", "", Path())
    path, _, name = given[1:].partition("#")
    text = read_text(path, _MOST_BYTES, _REMEDY)
    manifest = path.endswith(_MANIFESTS)
    starts = starts_in(text, path) if manifest else starts_of(text, path)
    return _one(starts, path, name, Path(path).parent)


def _one(starts: Sequence[Start], where: str, name: str, folder: Path) -> Launch:
    """The launch of the only start, or of starts that are equal but for ports and GPUs."""
    if name:
        starts = [start for start in starts if name in (start.name, *start.name.split("/"))]
    if not starts:
        named = f" in {name}" if name else ""
        raise BadInput(f"{where}: nothing{named} starts an engine; known are {_FORMS}")
    launches = [_launch(start, folder) for start in starts]
    first = launches[0]
    kinds = {(one.engine, one.version, repr(sorted(one.fields.items()))): one for one in launches}
    if len(kinds) > 1:
        listed = "; ".join(f"{one.where}: {one.command}" for one in kinds.values())
        way = f"name one as @{where}#NAME" if starts[0].name else "give one command"
        raise BadInput(f"{where} starts {len(kinds)} different engines; {way}: {listed}")
    read = f"{first.where}: {first.title} is read: {first.command}"
    notes = list(dict.fromkeys((read, *(note for one in launches for note in one.notes))))
    rules = profile(first.fields["engine"])
    if first.version not in (None, rules.version):
        notes.append(
            f"{first.where}: {first.title} is started, which is not known; rules and defaults are those of "
            f"{rules.label}"
        )
    replicas = sum(start.replicas for start in starts)
    if replicas > 1:
        notes.append(f"{where}: {replicas} equal replicas; one is read, and a fleet has them all")
    return replace(first, notes=tuple(notes), replicas=replicas)


def _launch(start: Start, folder: Path) -> Launch:
    given = parse(start.engine, start.arguments, start.where)
    reading = Reading(start.where, _with_files(start, given, folder), files=start.files)
    reading.follow()
    _READ[start.engine](reading)
    reading.fields["engine"] = nearest(reading.fields["engine"], start.version).text
    _check_model(reading)
    _gpus(reading, start)
    _variables(reading, start)
    return Launch(
        start.where,
        start.engine,
        start.version,
        reading.fields,
        reading.gpus,
        start.replicas,
        tuple(reading.notes),
        shlex.join((TITLES[start.engine], *start.arguments)),
    )


def _with_files(start: Start, given: Given, folder: Path) -> Given:
    """The options with those of the YAML file: vLLM's and SGLang's command line wins, TensorRT-LLM's file."""
    name = next((value for option, value in given.values.items() if option.names[0] == "config"), None)
    if name is None:
        return given
    if name in start.files:
        fields, where = _fields(start.files[name], name), f"{start.where}, {name}"
    else:
        path = folder / name
        fields, where = read_mapping(path, f"it is the --config of {start.where}"), str(path)
    read = from_mapping("trtllm-yaml" if start.engine == "trtllm" else start.engine, fields, where)
    if start.engine == "trtllm":
        return replace(given, values=given.values | read.values)
    return replace(given, values=read.values | given.values)


def _fields(text: str, name: str) -> dict[str, Any]:
    try:
        fields = parse_yaml(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{name}: not YAML ({error})") from None
    if not isinstance(fields, dict):
        raise BadInput(f"{name}: must hold `field: value` lines")
    return {str(key): value for key, value in fields.items()}


def _check_model(reading: Reading) -> None:
    """The model by the name it is known by: also of a folder that is not here, by the end of its path."""
    name = reading.fields.get("model")
    if not name:
        raise BadInput(f"{reading.where}: the engine is given no model; name it there")
    if "$" in name:
        raise BadInput(
            f"{reading.where}: the model is {name}, and nothing there sets it; write the name itself"
        )
    snapshot = _SNAPSHOT.search(name)
    if snapshot is not None:
        reading.fields["model"] = f"{snapshot[1]}/{snapshot[2]}"
    elif name.startswith(("/", "./", "~")) and not Path(name).expanduser().exists():
        tail = name.rstrip("/").rsplit("/", 1)[-1]
        try:
            find_model(tail)
        except BadInput:
            return
        reading.fields["model"] = tail
        reading.note(f"{name} is not here; it is taken for {tail}")


def _gpus(reading: Reading, start: Start) -> None:
    """Takes the GPU's type from a label, and says where the engine needs more GPUs than it may use."""
    if start.gpu is not None:
        try:
            reading.fields["gpu"] = find_gpu(start.gpu).name
        except BadInput:
            reading.caution(f"the GPU {start.gpu} is not known; give --gpu")
    if start.gpus is not None and start.gpus < reading.gpus:
        reading.note(f"the engine takes {reading.gpus} GPUs and may use {start.gpus} here")


def _variables(reading: Reading, start: Start) -> None:
    """A note on variables that the engine reads."""
    named = [
        name for name in start.variables if _ENGINE_VARIABLE.fullmatch(name) and not _QUIET.fullmatch(name)
    ]
    if named:
        reading.caution(
            f"not modelled, though a forecast may depend on it: {', '.join(named)} of the environment"
        )
