"""Scheduling rules: order, admission, victim and mix; a profile puts them together for an engine."""
