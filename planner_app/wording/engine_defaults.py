"""Sentence on the options that nobody chose, and that an engine decides."""

from __future__ import annotations

from pagecast.sim.scenario import Scenario

# Told only where they are not so.
_USUAL = {"enable_prefix_caching": True, "partial_reuse": "off", "enable_chunked_prefill": True}


def engine_defaults(scenario: Scenario) -> str:
    """`vLLM 0.24 defaults: max_num_seqs 1024, ...`; empty where every one is chosen. Errors: BadInput."""
    told = [(name, value) for name, value in scenario.defaults.items() if value != _USUAL.get(name)]
    listed = ", ".join(f"{name} {_word(value)}" for name, value in told)
    return f"{scenario.profile.label} defaults: {listed}" if told else ""


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)
