"""The gate for CI: figures held to bounds and to a baseline."""
