"""Prefix indexes: what a router believes that replicas have cached."""
