"""The Compare page: pinned views side by side, and files to take away."""
