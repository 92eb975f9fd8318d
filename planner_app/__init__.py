"""Answers: the command line, capacity search, sweeps, reports and the dashboard."""
