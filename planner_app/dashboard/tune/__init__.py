"""The Tune page: block size, HBM budget and cache size."""
