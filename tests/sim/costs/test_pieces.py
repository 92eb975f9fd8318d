"""Decode time over sliding windows: what is charged, and that cutting a stretch changes no nanosecond."""

from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.calibration.draw import ScaledCosts
from pagecast.sim.costs.decode_line import FEMTO, DecodeLine
from pagecast.sim.costs.measured.lines import ContextPieces
from pagecast.sim.costs.pieces import WindowLine
from pagecast.sim.costs.roofline import Roofline
from pagecast.sim.machine.gpus import gpu
from pagecast.sim.machine.models import model

FULL, NARROW, WIDE = 5_123_457, 31_415_926, 27_182_818  # femtoseconds a context token
BASE = 6_000_000 * FEMTO
MISTRAL = Roofline(model("mistralai/Mistral-7B-v0.1"), gpu("H200"))


def windowed(n: int) -> DecodeLine:
    line = WindowLine.over(DecodeLine(n, BASE, FULL, 0), 512, NARROW)
    return WindowLine.over(line, 4096, WIDE)


batches = st.tuples(st.integers(1, 256), st.integers(0, 6000), st.integers(0, 255), st.integers(1, 5000)).map(
    lambda t: (t[0], t[0] * t[1] + t[2], t[1] + t[2], t[3])
)  # n, ctx, longest, steps


@given(batches, st.data())
def test_any_cut_of_a_stretch_gives_the_same_nanoseconds(batch, data):
    n, ctx, longest, steps = batch
    line = windowed(n)
    cut = data.draw(st.integers(0, steps))
    whole = line.ns(ctx, longest, steps)
    assert whole == line.ns(ctx, longest, cut) + line.ns(ctx + n * cut, longest + cut, steps - cut)


@given(batches)
def test_a_step_reads_no_more_than_its_windows(batch):
    n, ctx, longest, _ = batch
    expected = FULL * ctx + NARROW * min(ctx, 512 * n) + WIDE * min(ctx, 4096 * n)
    assert abs(windowed(n).ns(ctx, longest) - (6_000_000 + expected / FEMTO)) < 2


@given(batches, st.integers(1, 3_000_000_000), st.integers(0, 2_000_000))
def test_as_many_steps_begin_as_counting_them_one_by_one_says(batch, within, extra):
    n, ctx, longest, most = batch
    line, most = windowed(n), min(most, 400)
    passed, begun = 0, 0
    while begun < most and (begun == 0 or passed < within):
        passed += line.ns(ctx + n * begun, longest + begun) + extra
        begun += 1
    assert line.steps_begun(ctx, longest, within, most, extra) == begun


def test_a_model_whose_layers_all_have_windows_costs_the_same_beyond_them():
    line = MISTRAL.decode_line(8)
    inside, edge, far = (line.ns(8 * ctx, ctx) for ctx in (1000, 4096, 100_000))
    assert inside < edge == far
    full = Roofline(model("Qwen/Qwen3-8B"), gpu("H200")).decode_line(8)
    assert full.ns(8 * 100_000, 100_000) > 3 * full.ns(8 * 4096, 4096)


def test_mixed_steps_and_prompt_chunks_stop_at_the_window_too():
    def beside(ctx: int) -> int:
        return MISTRAL.device_ns(Batch(64, 64 * ctx, ctx, ((512, 0),)))

    def chunk(context: int) -> int:
        return MISTRAL.device_ns(Batch(0, 0, 0, ((16, context),) * 40))

    assert beside(1000) < beside(4096) == beside(100_000)
    assert chunk(4096) == chunk(100_000)


def test_scaled_costs_keep_their_windows():
    double = ScaledCosts(MISTRAL, 2.0)
    for ctx in (1000, 4096, 100_000):
        plain = MISTRAL.decode_line(8).ns(8 * ctx, ctx)
        assert abs(double.decode_line(8).ns(8 * ctx, ctx) - 2 * plain) <= 2


def test_windows_are_said_to_be_charged_by_the_mean():
    assert MISTRAL.expected_error().figures["windows"]
    assert not Roofline(model("Qwen/Qwen3-8B"), gpu("H200")).expected_error().figures["windows"]


def measured_line(n: int) -> ContextPieces:
    pieces = [DecodeLine(n, 2_000 * FEMTO, 900, 0), DecodeLine(n, 0, 900 + 2_000 * FEMTO // (500 * n), 0)]
    return ContextPieces.of([0, 500 * n], pieces)


@given(batches, st.integers(0, 60_000), st.data())
def test_no_step_is_shorter_than_the_least(batch, least_ns, data):
    n, ctx, longest, steps = batch
    line, floored = measured_line(n), measured_line(n).at_least(least_ns * FEMTO)
    assert abs(floored.ns(ctx, longest) - max(line.ns(ctx, longest), least_ns)) <= 1
    cut = data.draw(st.integers(0, steps))
    rest = floored.ns(ctx + n * cut, longest + cut, steps - cut)
    assert floored.ns(ctx, longest, steps) == floored.ns(ctx, longest, cut) + rest
