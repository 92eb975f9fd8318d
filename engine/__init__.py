"""Runs it: a paged-KV engine in PyTorch, scheduled by `pagecast.sim.core`."""
