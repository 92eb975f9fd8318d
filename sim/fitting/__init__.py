"""Step costs fitted from recorded runs: the features of their steps, the fit, and how far to trust it."""
