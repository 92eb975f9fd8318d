"""Tells time: step costs, memory budget, SimPy replica, metrics and `replay`.

Importing this package imports nothing else, so that `pagecast.sim.core` stays free of SimPy,
pandas and torch. Import the modules you need: `from pagecast.sim.replay import replay`.
"""
