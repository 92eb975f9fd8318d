"""Scenario: everything besides the trace that a replay depends on."""

from pagecast.sim.scenario.flat import value_type
from pagecast.sim.scenario.host import DiskTier, HostTier
from pagecast.sim.scenario.scenario import CHECK, Scenario, read_fields

__all__ = ["CHECK", "DiskTier", "HostTier", "Scenario", "read_fields", "value_type"]
