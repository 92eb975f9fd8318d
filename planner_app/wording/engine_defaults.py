"""Sentence on the options that nobody chose, and that an engine decides."""

from __future__ import annotations

from collections.abc import Collection

from pagecast.sim.scenario import Scenario

# Told only where they are not so.
_USUAL = {"enable_prefix_caching": True, "partial_reuse": "off", "enable_chunked_prefill": True}


def engine_defaults(scenario: Scenario, *others: Scenario, varied: Collection[str] = ()) -> str:
    """`vLLM 0.24 defaults: max_num_seqs 1024, ...`; empty where every one is chosen. Errors: BadInput.

    `others`: servers beside the scenario, as those of a sweep: a default that differs among them is told with
    all its values. `varied`: the fields that differ, which nobody assumes.
    """
    servers = (scenario, *others)
    values: dict[str, list[object]] = {}
    for each in servers:
        for name, value in each.defaults.items():
            told = values.setdefault(name, [])
            told += [value] if value not in told else []
    listed = ", ".join(
        f"{name} {' or '.join(map(_word, told))}"
        for name, told in values.items()
        if name not in varied and told != [_USUAL.get(name)]
    )
    labels = " and ".join(dict.fromkeys(each.profile.label for each in servers))
    return f"{labels} defaults: {listed}" if listed else ""


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
