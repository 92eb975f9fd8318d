"""Capacity under an SLO, sweeps, tuning, and the gate for CI: one folder per question, over many replays.

`execution` runs the replays; `slo` judges them. Import the modules you need.
"""
