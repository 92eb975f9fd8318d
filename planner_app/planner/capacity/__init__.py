"""The most load that one server takes while it keeps a service level, and what limits it."""
