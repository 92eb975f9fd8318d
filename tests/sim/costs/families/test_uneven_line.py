"""Decode time of uneven batches: cutting a stretch of steps anywhere changes no nanosecond."""

from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.families.uneven_line import UnevenLine

KV = 34_453_800  # femtoseconds a context token
CAP, TAIL = 0.15, 5.94


def uneven(n: int) -> UnevenLine:
    base = 6_000_000 * FEMTO
    tail = DecodeLine(n, base, round(KV * (1 - TAIL / n)), round(KV * TAIL))
    cap = DecodeLine(n, base, round(KV * (1 + CAP)), 0)
    even = DecodeLine(n, base, round(KV * 1.2), 0)
    return UnevenLine.of(tail, cap, even, 64)


batches = st.tuples(
    st.integers(1, 256), st.integers(1, 8000), st.integers(0, 60_000), st.integers(1, 300)
).map(lambda t: (t[0], t[0] * t[1], t[1] + t[2], t[3]))  # n, ctx, longest, steps


@given(batches, st.data())
def test_any_cut_of_a_stretch_gives_the_same_nanoseconds(batch, data):
    n, ctx, longest, steps = batch
    line = uneven(n)
    cut = data.draw(st.integers(0, steps))
    whole = line.ns(ctx, longest, steps)
    assert whole == line.ns(ctx, longest, cut) + line.ns(ctx + n * cut, longest + cut, steps - cut)


@given(batches)
def test_a_step_takes_the_lesser_of_tail_and_cap_unless_the_batch_is_even(batch):
    n, ctx, longest, _ = batch
    line = uneven(n)
    mean = ctx / n
    tail = KV * (ctx + TAIL * (longest - mean))
    capped = KV * (1 + CAP) * ctx
    expected = KV * 1.2 * ctx if longest - mean < 64 else min(tail, capped)
    assert abs(line.ns(ctx, longest) - (6_000_000 + expected / FEMTO)) < 2 + 1e-6 * expected / FEMTO


@given(batches, st.integers(1, 3_000_000_000), st.integers(0, 2_000_000))
def test_as_many_steps_begin_as_counting_them_one_by_one_says(batch, within, extra):
    n, ctx, longest, most = batch
    line = uneven(n)
    passed, begun = 0, 0
    while begun < most and (begun == 0 or passed < within):
        passed += line.ns(ctx + n * begun, longest + begun) + extra
        begun += 1
    assert line.steps_begun(ctx, longest, within, most, extra) == begun
