"""Cost terms by kernel family: what a step's time is made of, one file for the kernels of each engine.

Start at `term.py`, which says what a term is; `registry.py` lists the families. A new effect is a `Term` in its
family's file, and nothing else: the fit, the replay, the transfer to another GPU and the reports read it there.
"""
