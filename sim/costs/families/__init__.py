"""Cost terms of a step's time by kernel family: one file for the kernels of each engine.

Start at `term.py`, which says what a term is; `registry.py` lists the families. To add an effect, add a
`Term` to its family's file: fit, replay, transfer to another GPU and reports read it there. A term that has
units in pure decode steps must be in the family's `line`, `warm_ns` or `shared_ns` as well, since a replay
sums these steps in closed form. Then fit the calibrations again: one without the term charges nothing for it.
"""
