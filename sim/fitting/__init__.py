"""Step costs fitted from recorded runs: the features of their steps, the fit, and how far to trust it.

Start at `build.py`, which makes a calibration of runs:

    features.py    a recorded run as columns, one for each term of `costs/calibration/terms.py`
    ahead.py       device times of steps, from runs with asynchronous scheduling
    design.py, fit.py    the matrix of a fit, and its solution
    overlap.py     what asynchronous scheduling hides, where the fit itself doesn't tell
    left_out.py, noise.py    errors on parts left out of the fit, and the noise that draws are made with
    sweep.py       the segments of a recorded sweep, joined to runs

`from_bench.py` is for set-ups without recordings: it corrects measured operations by a benchmark's results.
"""
