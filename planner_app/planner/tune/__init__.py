"""Recommendations of a block size and of an HBM budget."""
