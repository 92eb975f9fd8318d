"""The Trust page: calibrations in force, and forecasts beside recorded runs."""
