"""Options of an engine's command: every one that its parser knows, and what a forecast makes of it.

The tables lie beside each engine's rules (`sim/core/engines/<engine>/launch_options.txt`), a line per option.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pagecast.sim.core.errors import BadInput

Kind = Literal["value", "list", "maybe", "flag", "switch"]
Class = Literal["followed", "no-effect", "not-modelled"]
TABLES = {
    "vllm": ("vllm", "launch_options.txt"),
    "sglang": ("sglang", "launch_options.txt"),
    "trtllm": ("trtllm", "launch_options.txt"),
    "trtllm-yaml": ("trtllm", "llm_args.txt"),
}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "trtllm-yaml": "TensorRT-LLM's YAML"}
_DASHES = {"trtllm-yaml": ""}
_LEVEL = re.compile(r"-O(\d)")
_WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class EngineOption:
    """One option of an engine.

    `names`: without dashes in front but for short ones; the first is the option's own. `detail`: of a
    followed one, the field of a scenario, or - where the engine's reader makes fields of it; of one that is
    not modelled, the values that change nothing.
    """

    names: tuple[str, ...]
    kind: Kind
    kept: Class
    detail: str = ""
    dashes: str = "--"

    @property
    def written(self) -> str:
        """Its own name, as on a command line or in a file."""
        return self.dashes + self.names[0]

    def changes(self, value: Any) -> bool:
        """Whether a value differs from the defaults in `detail`."""
        text = json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
        return not self.detail or text not in self.detail.split("|")


@dataclass
class Given:
    """What a command line gives: values by option, and words that are no options'.

    `replaced`: values that a later one of the same option replaces, as in the engine's parser.
    """

    values: dict[EngineOption, Any] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    replaced: list[tuple[EngineOption, Any]] = field(default_factory=list)

    def give(self, option: EngineOption, value: Any) -> None:
        """Sets a value, in place of one that was given before."""
        if option in self.values and self.values[option] != value:
            self.replaced.append((option, self.values[option]))
        self.values[option] = value


@cache
def table(engine: str) -> tuple[EngineOption, ...]:
    """All options of an engine, or of its YAML file."""
    folder, name = TABLES[engine]
    text = files(f"pagecast.sim.core.engines.{folder}").joinpath(name).read_text(encoding="utf-8")
    dashes = _DASHES.get(engine, "--")
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(_option(dashes, *row) for row in rows)


def _option(dashes: str, names: str, kind: Any, kept: Any, detail: str = "") -> EngineOption:
    return EngineOption(tuple(names.split(",")), kind, kept, detail, dashes)


def _negatives(option: EngineOption) -> Iterator[str]:
    """Names that turn a switch off."""
    name = option.names[0]
    yield f"no-{name}"
    for prefix, inverse in (("enable-", "disable-"), ("disable-", "enable-")):
        if name.startswith(prefix):
            yield inverse + name.removeprefix(prefix)


@cache
def _by_name(engine: str) -> dict[str, tuple[EngineOption, bool]]:
    """Each option, and whether the name turns it on."""
    own = {name: (option, True) for option in table(engine) for name in option.names}
    switches = [option for option in table(engine) if option.kind == "switch"]
    return {name: (option, False) for option in switches for name in _negatives(option)} | own


def find(engine: str, written: str, where: str) -> tuple[EngineOption, bool]:
    """The option called `written`, and whether the name turns it on. Errors: BadInput with the nearest."""
    names = _by_name(engine)
    short = written if written.startswith("-") and not written.startswith("--") else ""
    name = written.lstrip("-")
    if engine != "trtllm-yaml":
        name = name.replace("_", "-")
    for known in (short, name):
        if known in names:
            return names[known]
    if written.startswith("--") and engine in ("vllm", "sglang"):  # argparse takes beginnings of names
        begun = {names[one] for one in names if one.startswith(name)}
        if len(begun) == 1:
            return begun.pop()
    near = get_close_matches(name, names, n=2, cutoff=0.6)
    dashes = _DASHES.get(engine, "--")
    hint = f"; nearest: {', '.join(dashes + one for one in near)}" if near else ""
    raise BadInput(
        f"{where}: {TITLES[engine]} has no option {written}{hint}; correct it, or leave it out of the launch"
    )


def parse(engine: str, words: Sequence[str], where: str) -> Given:
    """Reads a command line as the engine's parser does. Errors: BadInput naming the option."""
    given = Given()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            given.positional.append(word)
            continue
        if word == "--":
            given.positional += rest
            break
        level = _LEVEL.fullmatch(word)
        name, equals, value = ("-O", "=", level[1]) if level else word.partition("=")
        name, _, inner = name.partition(".")
        option, on = find(engine, name, where)
        if option.kind in ("flag", "switch"):
            if equals:
                raise BadInput(
                    f"{where}: {word}: {name} takes no value; write {name} or --no-{name.lstrip('-')}"
                )
            given.give(option, on)
            continue
        taken = [value] if equals else _taken(rest, option.kind)
        if not taken and option.kind == "value":
            raise BadInput(f"{where}: {word} has no value")
        _give(given, option, inner.rstrip("+"), taken)
    return given


def _taken(rest: list[str], kind: Kind) -> list[str]:
    """The words of an option's value, which leave `rest`."""
    most = len(rest) if kind == "list" else 1
    taken: list[str] = []
    while rest and len(taken) < most and (not _is_option(rest[0]) or (kind == "value" and not taken)):
        taken.append(rest.pop(0))
    return taken


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _give(given: Given, option: EngineOption, inner: str, taken: list[str]) -> None:
    """Sets a value; `inner` is the path of a field of a JSON value, written one by one."""
    if not inner:
        given.give(option, taken if option.kind == "list" else taken[0] if taken else True)
        return
    fields = given.values.setdefault(option, {})
    *parents, last = inner.split(".")
    for parent in parents:
        fields = fields.setdefault(parent, {})
    fields[last] = plain_value(taken[0])


def plain_value(text: str) -> Any:
    """A word as JSON, or as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return _WORDS.get(text.lower(), text)


def from_mapping(engine: str, fields: dict[str, Any], where: str) -> Given:
    """What a YAML file of options gives, by option. Errors: BadInput naming the option."""
    given = Given()
    for name, value in fields.items():
        dotted = f"{name}."
        if isinstance(value, dict) and any(one.names[0].startswith(dotted) for one in table(engine)):
            given.values |= from_mapping(
                engine, {dotted + str(key): one for key, one in value.items()}, where
            ).values
            continue
        option, on = find(engine, _DASHES.get(engine, "--") + name, where)
        given.values[option] = value if on else not value
    return given
