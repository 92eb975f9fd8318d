"""Engines as people start them: start scripts and manifests, and the logs of their starts."""
