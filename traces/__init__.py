"""Brings work: the trace schema, readers of public formats, generators, bundled samples."""
