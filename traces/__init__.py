"""Traces: their schema, readers of public formats, generators, bundled samples."""
