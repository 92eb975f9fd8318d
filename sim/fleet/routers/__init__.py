"""Routers: which replica gets a request. One file per router, and `registry` by name."""
