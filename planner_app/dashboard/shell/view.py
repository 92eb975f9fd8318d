"""A view: trace, load, scenario and SLO. All of it fits in a URL and in a command line.

A view is equal to another if both show the same; it names no user and holds no data. The names of its
parameters are those of the widgets and of the URL's query.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pagecast.planner_app.planner.load_fields import make_load
from pagecast.planner_app.planner.prices import priced, read_prices
from pagecast.sim.core.errors import BadInput
from pagecast.sim.scenario import Scenario, value_type
from pagecast.traces.load import Load

GENERATED, LOAD_TOOL, UPLOAD = "generated", "load", "upload"
AT_ONCE = 2000  # requests that are replayed while the page waits; more are a job
AT_ONCE_SPECULATING = 800  # the same where requests speculate: no step is skipped then
MOST_REQUESTS = 100_000

Value = str | int | float | bool | None
LOAD: dict[str, Value] = {
    "trace": "chat",
    "upload": "",
    "sort": False,
    "requests": AT_ONCE,
    "rate": 1.0,
    "concurrency": 0,
    "concurrency_ramp": 0.0,
    "max_tokens": 1.0,
    "repeat_prompts": 1,
    "warmup": 0,
    "slo": "ttft_p99<2s,tpot_p99<50ms",
    "prices": "",
}
GENERATOR: dict[str, Value] = {
    "g_rate": 5.0,
    "g_cv": 1.0,
    "g_input": 1000,
    "g_output": 200,
    "g_turns": 1,
    "g_system": 0,
}
# Of a load as load tools make it, by the fields of `Load`; those at their defaults are not given.
MADE: dict[str, Value] = {
    "m_input_len": "1024",
    "m_output_len": "128",
    "m_range_ratio": 0.0,
    "m_prefix_len": 0,
    "m_num_prefixes": 1,
    "m_distinct_prompts": 0,
    "m_turns": "1",
    "m_turn_delay": "0",
    "m_request_rate": 5.0,
    "m_burstiness": 1.0,
    "m_burst_size": 1,
    "m_ramp_up_end_rps": 0.0,
}
# Of a load whatever makes its requests; 0 and 1, as they are not given, change nothing.
_SENT = ("concurrency", "concurrency_ramp", "repeat_prompts", "warmup")
_NEEDED = {
    "m_num_prefixes": "m_prefix_len",
    "m_turn_delay": "m_turns",
    **dict.fromkeys(("m_burstiness", "m_burst_size", "m_ramp_up_end_rps"), "m_request_rate"),
}
NO_SPECULATION = "none"
SPECULATION: dict[str, Value] = {
    "spec_method": NO_SPECULATION,
    "spec_drafts": 3,
    "spec_acceptance": 0.7,
}
_WORDS: dict[str, Value] = {"default": None, "none": None, "the engine's": None}  # of boxes with a choice
_SHOWN: dict[str, Value] = {"kv_offloading_size": 0.0}  # a slider shows 0 where there is no such tier


def scenario_defaults(kind: type[Scenario] = Scenario) -> dict[str, Value]:
    """The parameters that are fields of a scenario, with their defaults."""
    fields = {name: info.default for name, info in kind.flat_fields().items()}
    return {**fields, **_SHOWN}


SCENARIO = scenario_defaults()
DEFAULTS: dict[str, Value] = {**LOAD, **GENERATOR, **MADE, **SPECULATION, **SCENARIO}
_TYPES = {
    **{name: type(value) for name, value in DEFAULTS.items()},
    **{name: value_type(info) for name, info in Scenario.flat_fields().items()},
}


@dataclass(frozen=True, slots=True)
class PageView:
    """Parameters by name, those at their default left out: `PageView.of({"block_size": 32})`."""

    changed: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> PageView:
        """A view of parameters in their types. Errors: BadInput for an unknown name or an unfit value."""
        if unknown := sorted(set(parameters) - set(DEFAULTS)):
            raise BadInput(f"view: parameter {unknown[0]!r} is not known; there are {', '.join(DEFAULTS)}")
        typed = {name: _typed(name, value) for name, value in parameters.items()}
        view = cls(
            tuple((name, typed[name]) for name in DEFAULTS if name in typed and typed[name] != DEFAULTS[name])
        )
        view.check()
        return view

    @classmethod
    def from_query(cls, query: str) -> PageView:
        """The view that `query()` gave. Errors: BadInput."""
        return cls.of(dict(parse_qsl(query, keep_blank_values=True, max_num_fields=len(DEFAULTS))))

    def query(self) -> str:
        """The part of a URL that makes this view."""
        return urlencode([(name, _text(value)) for name, value in self.changed])

    def __getitem__(self, name: str) -> Any:
        return dict(self.changed).get(name, DEFAULTS[name])

    def check(self) -> None:
        """Errors: BadInput for what no replay could be made of."""
        if not 1 <= self["requests"] <= MOST_REQUESTS:
            raise BadInput(f"requests is {self['requests']}; the dashboard takes 1 to {MOST_REQUESTS:,}")
        if not 0 < self["rate"] < float("inf"):
            raise BadInput(f"rate is {self['rate']}; it must be above 0")
        self.load()
        self.scenario()

    def load(self) -> Load:
        """How requests are sent, and what they are like where a load makes them. Errors: BadInput."""
        most = None if self["max_tokens"] == 1 else f"{_text(self['max_tokens'])}x"
        fields = {name: self[name] for name in _SENT if self[name] != DEFAULTS[name]} | {"max_tokens": most}
        if not self["concurrency"]:
            fields.pop("concurrency_ramp", None)
        return make_load(fields | (self._made() if self["trace"] == LOAD_TOOL else {}), "view")

    def _made(self) -> dict[str, Value]:
        """The fields of a load that makes requests; a rate of 0 sends all at once."""
        given = {name for name in MADE if self[name] != MADE[name]} | {"m_input_len", "m_output_len"}
        if self["m_request_rate"]:
            given.add("m_request_rate")
        without = {name for name, needed in _NEEDED.items() if needed not in given}
        fields = {name.removeprefix("m_"): self[name] for name in MADE if name in given - without}
        if "request_rate" in fields:
            fields["request_rate"] = self["m_request_rate"] * self["rate"] or None
        if "ramp_up_end_rps" in fields:
            fields["ramp_up_end_rps"] = self["m_ramp_up_end_rps"] * self["rate"]
            fields |= {"ramp_up_strategy": "linear", "ramp_up_start_rps": fields.pop("request_rate")}
        if "range_ratio" in fields:
            fields["range_ratio"] = _text(self["m_range_ratio"])
        return {**fields, "num_prompts": self["requests"]}

    def scenario(self) -> Scenario:
        """The scenario to replay. Errors: BadInput naming the field."""
        fields = {name: self[name] for name in SCENARIO}
        fields["kv_offloading_size"] = fields["kv_offloading_size"] or None
        if self["spec_method"] != NO_SPECULATION:
            if fields["speculative_config"]:
                raise BadInput(
                    "speculation is given twice: set its method to none, or empty speculative_config"
                )
            words = (self[name] for name in SPECULATION)
            fields["speculative_config"] = ":".join(_text(word) for word in words)
        return Scenario.make(fields, "scenario")

    @property
    def most_at_once(self) -> int:
        """The longest trace, in requests, that is replayed while the page waits."""
        speculates = self["speculative_config"] or self["spec_method"] != NO_SPECULATION
        return AT_ONCE_SPECULATING if speculates else AT_ONCE

    def without(self, names: Iterable[str]) -> PageView:
        """The same with some parameters at their defaults."""
        names = set(names)
        return PageView(tuple((name, value) for name, value in self.changed if name not in names))

    def prices(self) -> dict[str, float]:
        """USD per GPU-hour by the GPU's name; none where what was typed can't be read, as its box says."""
        try:
            return typed_prices(str(self["prices"]), self["gpu"])
        except BadInput:
            return {}

    def trace_key(self) -> tuple[Value, ...]:
        """The part of a view that its trace depends on: equal keys, equal traces."""
        names = ["trace", "requests", "rate", "max_tokens", *_SENT]
        if self.load().given():
            names += ["seed"]
        if self["trace"] == GENERATED:
            names += [*GENERATOR, "seed"]
        if self["trace"] == LOAD_TOOL:
            names += list(MADE)
        if self["trace"] == UPLOAD:
            names += ["upload", "sort", "seed"]
        return tuple(self[name] for name in names)

    def key(self) -> tuple[object, ...]:
        """The part of a view that its replay depends on."""
        return (*self.trace_key(), self.scenario())

    def differences(self, other: PageView) -> tuple[tuple[str, Value, Value], ...]:
        """Name, other's value and own value of every parameter in which they differ."""
        return tuple((name, other[name], self[name]) for name in DEFAULTS if self[name] != other[name])


def same(name: str, text: str, value: Value) -> bool:
    """Whether a parameter's text in a link stands for `value`."""
    if text in _WORDS and _WORDS[text] == value:
        return True
    try:
        typed = _typed(name, text)
    except BadInput:
        return False
    if isinstance(typed, float) and isinstance(value, int | float):
        return isclose(typed, value, rel_tol=1e-6)
    return typed == value or (not typed and not value)


def typed_prices(text: str, gpu: str) -> dict[str, float]:
    """USD per GPU-hour by the GPU's name, as typed: `H200=3.5, L40S=1.2`; a number alone is of `gpu`.

    Errors: BadInput.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    words = [part if "=" in part else f"{gpu}={part}" for part in parts]
    try:
        return priced(read_prices(words), ())
    except BadInput as error:
        problem = str(error).removeprefix("--price ").partition(": write ")[0]
        raise BadInput(
            f"{problem}: write a number above 0, in USD per GPU-hour, or a GPU and its price: {gpu}=3.5"
        ) from None


def _typed(name: str, value: Any) -> Value:
    kind = _TYPES[name]
    if DEFAULTS[name] is None and value in (None, ""):
        return None
    try:
        if kind is bool:
            return value if isinstance(value, bool) else {"true": True, "false": False}[str(value).lower()]
        typed: Value = kind(value)
        return typed
    except (KeyError, ValueError, TypeError, OverflowError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise BadInput(f"view: {name} is {str(value)[:80]!r}; give {expected}") from None


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def generator_options(view: PageView) -> dict[str, str]:
    """The options of `pagecast trace generate` for a generated trace."""
    cv = view["g_cv"]
    options = {
        "--arrivals": "gamma" if cv != 1 else "poisson",
        "--rate": _text(view["g_rate"]),
        "--requests": str(view["requests"]),
        "--input": f"lognormal:p50={view['g_input']},sigma=0.8,max=32000",
        "--output": f"lognormal:p50={view['g_output']},sigma=0.7,max=4000",
        "--seed": str(view["seed"]),
    }
    if cv != 1:
        options["--cv"] = _text(cv)
    if view["g_turns"] > 1:
        options["--turns"] = f"lognormal:p50={view['g_turns']},sigma=0.5"
        if view["g_system"]:
            options["--system-prompt"] = str(view["g_system"])
    return options


def command(view: PageView, file: str = "", scenario_file: str = "") -> str:
    """The command line that prints this view's figures; `file` is an uploaded trace's own name.

    With `scenario_file` the scenario is taken from it; otherwise every option stands in the command.
    """
    lines, trace = [], view["trace"]
    if trace == GENERATED:
        trace = "generated.jsonl.gz"
        lines.append(_shell(["pagecast", "trace", "generate", trace, *_pairs(generator_options(view))]))
    elif trace == UPLOAD:
        trace = f"./{file}" if file.startswith("-") else file or "your-trace"
    words = ["pagecast", "replay"]
    if trace != LOAD_TOOL:
        words += [trace, "--limit", str(view["requests"])]
        if view["rate"] != 1:
            words += ["--speedup", _text(view["rate"])]
    for name, value in view.load().given().items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    if view["trace"] == UPLOAD and view["sort"]:
        words.append("--sort")
    words += ["--scenario", scenario_file] if scenario_file else _options(view)
    return " &&\n".join([*lines, _shell(words)])


def _options(view: PageView) -> list[str]:
    words: list[str] = []
    scenario, names = view.scenario(), {"model", "gpu"}
    options = scenario.flat()
    for name in SCENARIO:
        option, value = "--" + name.replace("_", "-"), options[name]
        if value is None or (value == DEFAULTS[name] and name not in names):
            continue
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, _text(value)]
    return words


def _pairs(options: Mapping[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair]


def _shell(words: list[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)
