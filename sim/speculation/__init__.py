"""Speculative decoding: what is drafted, what is accepted, and what drafting costs."""
