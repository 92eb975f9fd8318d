"""Step costs composed of operations that others measured, one table per GPU and engine."""
