"""Executors of many replays at once: in this process, in several, or on a cluster."""
