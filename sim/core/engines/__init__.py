"""Engines: a folder for each, and `registry.py`, which lists their profiles by name.

An engine's folder has its rules, the settings that only it has, the names that it gives options, and in
`profile.py` its version, what it refuses, and how a replica is put together. `profile.py` here is what all
profiles share. Rules that several engines follow are in `sim/core/rules`.
"""

DEFAULT_ENGINE = "vllm@0.33"
"""The engine where none is chosen: the newest version that is known."""
