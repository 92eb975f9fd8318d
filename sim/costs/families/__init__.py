"""Cost terms by kernel family: what a step's time is made of, one file for the kernels of each engine.

Start at `term.py`, which says what a term is; `registry.py` lists the families. A new effect is a `Term` in
its family's file, and nothing else: fit, replay, transfer to another GPU and reports read it there.
"""
