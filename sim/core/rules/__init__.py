"""Scheduling rules: order, admission, victim and mix; a profile is one of each."""
