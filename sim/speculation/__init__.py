"""Speculative decoding: what is drafted, what of it is right, and what drafting costs."""
