"""Quantities as people read them: counts, durations and sizes in bytes."""

from __future__ import annotations

from math import inf
from typing import Any


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 request`, `2,000 requests`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def replicas_there(fleet: dict[str, Any]) -> str:
    """How many replicas a fleet has, of a summary's `fleet`: `4 replicas`, `2 to 5 replicas (13 started)`."""
    least, most, started = fleet["least_replicas"], fleet["peak_replicas"], fleet["replicas"]
    text = counted(most, "replica") if least == most else f"{least:,} to {counted(most, 'replica')}"
    return text if started == most else f"{text} ({started:,} started)"


def gpus_there(fleet: dict[str, Any]) -> str:
    """How many GPUs a fleet has, of a summary's `fleet`: `4 GPUs`, or `at most 5 GPUs` where that varies."""
    bound = "at most " if fleet["least_replicas"] != fleet["peak_replicas"] else ""
    return bound + counted(fleet["peak_gpus"], "GPU")


def share(value: float | None) -> str:
    """A share in percent: `61.3%`; `unknown` where nothing tells it."""
    return "unknown" if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """A duration as people read it: `35.2 ms`, `1.43 s`, `2m05s`, `4h20m`, `infinite`."""
    if value is None:
        return "-"
    if value == inf:
        return "infinite"
    if value < 0.9995e-3:
        return f"{value * 1e6:.0f} us" if value else "0"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
    if value < 120:
        return f"{value:.3g} s" if value < 99.5 else f"{value:.0f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(value / 60)
    return f"{minutes // 60}h{minutes % 60:02d}m"


def size(value: float) -> str:
    """Bytes as people read them: `288 MiB`, `109 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def told_apart(sources: dict[str, int]) -> str:
    """Hits by kind, and misses; empty where all hits are of whole blocks on the device."""
    if not any(sources[kind] for kind in ("partial", "host", "disk")):
        return ""
    kinds = ("exact", "partial", "host", "disk")
    hits = ", ".join(f"{sources[kind]:,} {kind}" for kind in kinds if sources[kind])
    return f"{hits} hits, {sources['missed']:,} missed"
