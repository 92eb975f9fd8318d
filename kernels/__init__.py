"""Moves bytes: Triton kernels for a paged KV cache. Importing this package imports nothing."""
