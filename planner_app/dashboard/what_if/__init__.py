"""The What-if page: the figures of one scenario."""
