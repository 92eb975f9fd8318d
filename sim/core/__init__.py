"""Decides: requests, blocks, prefix reuse, eviction, admission, scheduling.

The same code drives the simulator and the GPU engine. It imports the standard library, numpy and
xxhash, and has no clock, randomness or I/O: `now` is always passed in, in integer nanoseconds.
"""
