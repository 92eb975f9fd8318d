"""The most load that one server takes while it keeps an SLO, and what limits it."""
