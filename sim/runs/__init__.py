"""Recorded runs of real engines: their files, their decisions replayed, and forecasts beside them."""
