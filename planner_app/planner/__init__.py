"""Answers: capacity under an SLO, sweeps, tuning, and the gate for CI. Import the modules you need."""
