"""Size of the groups in which fp8 weights and activations are scaled."""

GROUP = 128
"""Inputs that share a scale."""
