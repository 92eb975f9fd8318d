"""The recipe of a generated trace, kept with it, so that other seeds of its generator can be replayed.

A recipe is plain JSON: the options of `pagecast trace generate`, and what was done to the trace since that
can be done to another one as well (`limit`, `speedup`). Operations that can't be repeated so drop it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.errors import BadInput
from pagecast.traces import lengths
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.generate import Conversations, conversations, requests
from pagecast.traces.load import Load
from pagecast.traces.operations import scale, select
from pagecast.traces.schema import REQUIRED, Recipe, Trace, table
from pagecast.traces.servegen import load_clients, servegen

_IN = "input_tokens"
_MOST_LENGTHS = 50_000  # of a trace that lengths are drawn from, for a file to hold them beside its own


def play(recipe: Recipe, seed: int) -> Trace:
    """The trace that a recipe gives with `seed`, and the recipe with it, unless that is too long to keep.

    Raises BadInput for options that make none.
    """
    try:
        trace = _MAKERS[str(recipe["make"])](recipe, seed)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"recipe of a generated trace: missing or of the wrong kind ({error})") from None
    limit, speedup = recipe.get("limit"), recipe.get("speedup", 1.0)
    if limit is not None:
        trace = select(trace, np.arange(min(int(limit), len(trace))))
    if speedup != 1.0:
        trace = scale(trace, float(speedup))
    long = len(recipe.get("like", {}).get(_IN, ())) > _MOST_LENGTHS
    return replace(trace, recipe=None if long else {**recipe, "seed": seed})


def another(trace: Trace, seed: int) -> Trace | None:
    """The trace that the same generator makes of another seed, for each `seed` of 0 and more.

    None where it has no recipe, or one that no longer makes it: lines were cut from the file by hand, or
    ServeGen's clients are not where they were.
    """
    if trace.recipe is None or not _makes(trace.recipe, trace):
        return None
    try:
        copy = play(trace.recipe, int(trace.recipe["seed"]) + 1 + seed)
    except BadInput:  # of this seed nothing arrives
        return None
    return replace(copy, name=trace.name, notes=trace.notes)


_last: tuple[pd.DataFrame, bool] | None = None  # requests whose recipe was checked


def _makes(recipe: Recipe, trace: Trace) -> bool:
    """Whether a recipe gives this very trace."""
    global _last
    if _last is None or _last[0] is not trace.requests:
        try:
            again = play(recipe, int(recipe["seed"]))
        except (BadInput, KeyError, TypeError, ValueError):
            _last = (trace.requests, False)
        else:
            same = len(again) == len(trace) and all(
                np.allclose(again.column(name), trace.column(name), rtol=1e-9, atol=1e-9, equal_nan=True)
                for name in REQUIRED
            )
            _last = (trace.requests, same)
    return _last[1]


def _arrivals(recipe: Mapping[str, Any]) -> ArrivalProcess:
    return ArrivalProcess(str(recipe["arrivals"]), float(recipe["rate"]), float(recipe["cv"]))


def _requests(recipe: Mapping[str, Any], seed: int) -> Trace:
    laws = (lengths.parse(str(recipe[name])) for name in ("input", "output"))
    like = recipe.get("like")
    source = None if like is None else Trace("like", table({"arrival_s": np.zeros(len(like[_IN])), **like}))
    count, duration_s = recipe["requests"], recipe["duration"]
    return requests(_arrivals(recipe), *laws, like=source, count=count, duration_s=duration_s, seed=seed)


def lengths_of(trace: Trace) -> dict[str, list[int]]:
    """The part of a recipe that describes a trace from which lengths are drawn."""
    return {name: trace.integers(name).tolist() for name in (_IN, "output_tokens")}


def _conversations(recipe: Mapping[str, Any], seed: int) -> Trace:
    turns, message, output, think, opening = (
        lengths.parse(str(recipe[name])) for name in ("turns", "message", "output", "think", "input")
    )
    shape = Conversations(
        _arrivals(recipe),
        turns,
        message,
        output,
        think,
        tuple(recipe["system_prompt"]),
        opening,
        most_tokens=int(recipe["most_tokens"]),
    )
    most = recipe["requests"]
    return conversations(shape, sessions=most, duration_s=recipe["duration"], count=most, seed=seed)


def _load(recipe: Recipe, seed: int) -> Trace:
    return Load.of(recipe["load"]).trace(seed)


def _sent(recipe: Recipe, seed: int) -> Trace:
    return Load.of(recipe["load"]).sent(play(recipe["of"], seed), seed)


def _servegen(recipe: Mapping[str, Any], seed: int) -> Trace:
    return servegen(
        load_clients(Path(recipe["servegen"])),
        start_s=float(recipe["start"]),
        duration_s=float(recipe["duration"]),
        rate=recipe["rate"],
        seed=seed,
    )


_MAKERS = {
    "requests": _requests,
    "conversations": _conversations,
    "load": _load,
    "sent": _sent,
    "servegen": _servegen,
}
