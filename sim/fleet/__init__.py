"""Fleets: replicas behind routers, over time.

from pagecast.sim.fleet.simulation import replay_fleet
"""
