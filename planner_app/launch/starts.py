"""Starts of engines among commands: an engine's own command, a Python module, or a container."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pagecast.planner_app.launch.shell import Command, Script, Value, read_shell
from pagecast.sim.core.errors import BadInput

_MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "vllm.entrypoints.api_server": "vllm",
    "vllm.entrypoints.cli.main": "vllm",
    "dynamo.vllm": "vllm",
    "sglang.launch_server": "sglang",
    "dynamo.sglang": "sglang",
}
_SCRIPT = re.compile(r".*vllm/entrypoints/(openai/)?api_server\.py")
_COMMANDS = {("vllm", "serve"): "vllm", ("sglang", "serve"): "sglang", ("trtllm-serve", "serve"): "trtllm"}
_OTHER_SERVERS = ("disaggregated", "mm_embedding_serve", "disaggregated_mpi_worker", "grpc", "embedding")
_WRAPPERS = {  # options of what starts an engine inside, with the number of words of their values
    "dynamo.vllm": {
        "--disaggregation-mode": 1,
        "--is-prefill-worker": 0,
        "--is-decode-worker": 0,
        "--connector": 1,
        "--migration-limit": 1,
    },
    "dynamo.sglang": {"--disaggregation-strategy": 1, "--migration-limit": 1},
}
_IMAGES = (("vllm", "vllm"), ("sglang", "sglang"), ("tensorrt-llm", "trtllm"), ("trtllm", "trtllm"))
_TAG = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
_PIN = re.compile(r"(vllm|sglang|tensorrt[-_]llm)(?:\[[^]]*\])?==(.+)")
_DOCKER = ("docker", "podman", "nerdctl")
_DOCKER_FLAGS = re.compile(
    r"-[ditPq]+|--(detach|interactive|tty|rm|privileged|init|read-only|publish-all|quiet|no-healthcheck|"
    r"oom-kill-disable)"
)
_NO_STARTS = ("echo", "printf", "which", "pip", "pip3", "kill", "pkill", "grep", "cat", "curl")


@dataclass(frozen=True)
class Start:
    """One start of an engine: its arguments, and what is known around them.

    `gpus`: those that it may use; None where nothing says. `gpu`: their type, as a label has it.
    """

    engine: str
    arguments: tuple[str, ...]
    where: str
    version: str | None = None
    variables: Mapping[str, Value] = field(default_factory=dict, hash=False)
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    gpus: int | None = None
    gpu: str | None = None
    replicas: int = 1
    name: str = ""


def starts_of(text: str, where: str, variables: Mapping[str, Value] | None = None) -> list[Start]:
    """Every start of an engine in a shell text. Errors: BadInput."""
    script = read_shell(text, where, variables)
    pins: dict[str, str] = {}
    found = []
    for command in script.commands:
        for word in command.words:
            pin = _PIN.fullmatch(word)
            version = version_of(_engine_of_pin(pin[1]), pin[2]) if pin else None
            if pin is not None and version is not None:
                pins[_engine_of_pin(pin[1])] = version
        found += list(_of_command(command, script, f"{where} line {command.line}"))
    return [one if one.version else replace(one, version=pins.get(one.engine)) for one in found]


def _engine_of_pin(package: str) -> str:
    return "trtllm" if package.startswith("tensorrt") else package


def _of_command(command: Command, script: Script, where: str) -> Iterator[Start]:
    words = list(command.words)
    first = _base(words[0])
    if first in _NO_STARTS or words[:2] == ["uv", "pip"]:
        return
    around = Start("", (), where, variables=command.variables, files=script.files)
    around = replace(around, gpus=_visible(command.variables))
    if first == "sudo" and len(words) > 1:
        first = _base(words[1])
    if first in _DOCKER and "run" in words:
        yield from _of_docker(words[words.index("run") + 1 :], around)
    else:
        yield from of_words(words, around)


def of_words(words: Sequence[str], around: Start) -> Iterator[Start]:
    """The starts in the words of a command; a shell's text among them is read as a script."""
    inner = _shell_text(words)
    if inner is not None:
        for one in starts_of(inner, around.where, around.variables):
            merged = replace(around, files={**around.files, **one.files})
            yield replace(
                merged,
                engine=one.engine,
                arguments=one.arguments,
                variables=one.variables,
                version=one.version or around.version,
                gpus=one.gpus or around.gpus,
            )
        return
    found = find(words, around.where)
    if found is not None:
        engine, arguments = found
        yield replace(around, engine=engine, arguments=tuple(arguments))


def _shell_text(words: Sequence[str]) -> str | None:
    for at, word in enumerate(words[:-2]):
        if _base(word) in ("sh", "bash", "zsh"):
            for option, text in zip(words[at + 1 :], words[at + 2 :], strict=False):
                if re.fullmatch(r"-[a-z]*c", option):
                    return text
                if not option.startswith("-"):
                    break
    return None


def find(words: Sequence[str], where: str) -> tuple[str, list[str]] | None:
    """The engine that the words start and its arguments; None where they start none. Errors: BadInput."""
    for at, word in enumerate(words):
        rest = list(words[at + 1 :])
        base = _base(word)
        if base == "trtllm-serve":
            if rest and rest[0] in _OTHER_SERVERS:
                raise BadInput(
                    f"{where}: trtllm-serve {rest[0]} is no single engine; give one with trtllm-serve MODEL"
                )
            return "trtllm", rest[1:] if rest[:1] == ["serve"] else rest
        engine = _COMMANDS.get((base, rest[0])) if rest else None
        if engine is not None:
            return engine, rest[1:]
        if word == "-m" and rest and rest[0] in _MODULES:
            arguments = _without(rest[1:], _WRAPPERS.get(rest[0], {}))
            return _MODULES[rest[0]], arguments[1:] if arguments[:1] == ["serve"] else arguments
        if _SCRIPT.fullmatch(word):
            return "vllm", rest
    return None


def _without(words: list[str], options: Mapping[str, int]) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in options:
            kept.append(word)
        elif not equals:
            for _ in range(options[name]):
                next(rest, None)
    return kept


def _of_docker(words: list[str], around: Start) -> Iterator[Start]:
    """The starts in `docker run`: options of docker, an image, and its arguments."""
    variables = dict(around.variables)
    gpus, entry = around.gpus, None
    rest = list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals and not _DOCKER_FLAGS.fullmatch(name) and rest:
            value = rest.pop(0)
        if name in ("-e", "--env") and "=" in value:
            variable, _, text = value.partition("=")
            variables[variable] = text
        elif name == "--gpus":
            gpus = _of_gpus_option(value)
        elif name == "--entrypoint":
            entry = value.split()
    if rest:
        around = replace(around, variables=variables, gpus=gpus or _visible(variables))
        yield from in_container(rest[0], entry, rest[1:], around)


def in_container(
    image: str, command: list[str] | None, arguments: list[str], around: Start
) -> Iterator[Start]:
    """The starts in a container: of its command, or of what its image starts by itself."""
    engine = next((one for name, one in _IMAGES if name in image.lower()), None)
    own_tag = engine and ":" in image and "dynamo" not in image  # Dynamo's tags are Dynamo's versions
    version = version_of(engine, image.rpartition(":")[2]) if own_tag else None
    around = replace(around, version=version)
    words = [*(command or ()), *arguments]
    found = list(of_words(words, around))
    if not found and not command and "vllm-openai" in image.lower():
        found = [replace(around, engine="vllm", arguments=tuple(words))]
    yield from (one if one.engine == engine else replace(one, version=None) for one in found)


def version_of(engine: str | None, tag: str) -> str | None:
    """A version as profiles have it: SGLang has three numbers, others two; None for other tags."""
    match = _TAG.match(tag)
    if match is None:
        return None
    parts = match.groups() if engine == "sglang" else match.groups()[:2]
    return ".".join(part for part in parts if part)


def _of_gpus_option(value: str) -> int | None:
    """GPUs of docker's `--gpus`: a number, or `device=0,1`."""
    value = value.strip("'\"")
    if value.isdecimal():
        return int(value)
    devices = re.search(r"device=([\w,-]+)", value)
    return len(devices[1].split(",")) if devices else None


def _visible(variables: Mapping[str, Value]) -> int | None:
    text = variables.get("CUDA_VISIBLE_DEVICES")
    return len(text.split(",")) if isinstance(text, str) and text and "$" not in text else None


def _base(word: str) -> str:
    return word.rsplit("/", 1)[-1]
