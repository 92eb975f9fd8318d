"""Processor cores that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """How many cores this process may use: those it is bound to, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
