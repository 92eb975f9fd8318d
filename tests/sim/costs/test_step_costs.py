"""A decode run summed at once is the same nanosecond as its steps summed one by one."""

from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.costs.decode_line import DecodeLine

LINES = st.builds(
    DecodeLine,
    n=st.integers(1, 300),
    base=st.integers(0, 10**14),
    per_ctx=st.integers(0, 10**8),
    per_max=st.integers(0, 10**8),
)
PLACES = st.tuples(st.integers(0, 10**8), st.integers(0, 10**6))


@given(LINES, PLACES, st.integers(1, 200))
def test_steps_add_up_exactly(line, place, steps):
    ctx, mx = place
    one_by_one = sum(line.ns(ctx + i * line.n, mx + i) for i in range(steps))
    assert line.ns(ctx, mx, steps) == one_by_one


@given(LINES, PLACES)
def test_a_step_takes_what_the_line_says(line, place):
    ctx, mx = place
    exact = (line.base + line.per_ctx * ctx + line.per_max * mx) / 1e6
    assert abs(line.ns(ctx, mx) - exact) <= 1 + exact * 1e-12


@given(LINES, PLACES, st.integers(0, 10**12), st.integers(1, 500), st.integers(0, 10**7))
def test_steps_begun_counts_as_a_clock_would(line, place, within, most, extra):
    ctx, mx = place
    begun, clock = 1, 0
    while begun < most:
        clock += line.ns(ctx + (begun - 1) * line.n, mx + begun - 1) + extra
        if clock >= within:
            break
        begun += 1
    assert line.steps_begun(ctx, mx, within, most, extra) == begun
