"""Searches of a space of scenarios for the cheapest replica."""
