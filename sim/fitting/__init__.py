"""Step costs fitted from recorded runs: the features of their steps, the fit, and its errors.

Start at `build.py`: `calibrate` makes a calibration from runs. The terms are in `costs/families`; here are

    features.py     a recorded run as columns, one for each term of its kernel family
    ahead.py        device times of steps, from runs with asynchronous scheduling
    design.py       the matrix of a fit
    fit.py          its solution (`monotone.py`: non-negative least squares with a rising curve)
    selection.py    the choice of terms, by the error on data left out
    overlap.py      the host time that asynchronous scheduling hides, where recordings have no device times
    left_out.py     errors on recordings and segments left out of the fit
    noise.py        standard deviations, from which forecasts draw
    sweep.py        the segments of a recorded sweep, joined into runs

`from_bench.py` is for set-ups without recordings: it corrects measured operations by a benchmark's results.
"""
