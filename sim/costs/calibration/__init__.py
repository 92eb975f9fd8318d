"""Step costs fitted from recorded runs: features of a step, the fit, its file, and the costs it gives."""
