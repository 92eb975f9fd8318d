"""Generated traces have the rates, burstiness and lengths asked for, and depend on the seed alone."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.traces.arrivals import ArrivalProcess
from pagecast.traces.checks import validate
from pagecast.traces.generate import Conversations, Retrieval, conversations, requests, retrieval
from pagecast.traces.lengths import ConstantLength, Empirical, LogNormal, Uniform, parse, tokens

from .making import output_tokens, prompt_tokens

RNG = np.random.default_rng


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.3), ("gamma", 3.0), ("weibull", 2.0)])
def test_rate_and_burstiness(kind: str, cv: float) -> None:
    law = ArrivalProcess(kind, 4.0, cv)
    gaps = law.gaps_s(100_000, RNG(1))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 5.0), ("weibull", 5.0), ("even", 0.0)])
def test_short_windows_hold_as_many_as_the_rate_says(kind: str, cv: float) -> None:
    law, rng = ArrivalProcess(kind, 0.5, cv), RNG(2)
    counts = [len(law.times_s(rng, duration_s=10.0)) for _ in range(4000)]
    assert np.mean(counts) == pytest.approx(5.0, abs=5 * np.std(counts) / np.sqrt(4000) + 1e-9)


@given(st.sampled_from(["poisson", "gamma", "weibull", "even"]), st.integers(1, 50), st.floats(0.1, 100))
def test_times_rise_and_stop_where_told(kind: str, count: int, duration_s: float) -> None:
    law = ArrivalProcess(kind, 1.0, 0.7)
    assert len(law.times_s(RNG(0), count=count)) == count
    times = law.times_s(RNG(0), count=count, duration_s=duration_s)
    assert len(times) <= count
    assert (np.diff(times) >= 0).all()
    assert (times < duration_s).all()


def test_lengths() -> None:
    assert tokens(parse("512"), 3, RNG(0)).tolist() == [512] * 3
    assert set(tokens(parse("uniform:3-5"), 500, RNG(0))) == {3, 4, 5}
    normal = parse("normal:mean=1000,sd=200,max=1200").sample(20_000, RNG(0))
    assert (np.median(normal), normal.max()) == (pytest.approx(1000, rel=0.01), 1200)
    assert np.quantile(normal, 0.159) == pytest.approx(800, rel=0.01)
    assert parse("normal:mean=100,sd=50").sample(20_000, RNG(0)).min() == 1
    drawn = parse("lognormal:p50=1000,sigma=0.5,max=3000").sample(20_000, RNG(0))
    assert np.median(drawn) == pytest.approx(1000, rel=0.03)
    assert drawn.max() <= 3000
    assert parse("lognormal:mean=1000,sigma=0.5").sample(50_000, RNG(0)).mean() == pytest.approx(
        1000, rel=0.03
    )
    weighted = Empirical((1, 7), (3, 1)).sample(20_000, RNG(0))
    assert (weighted == 7).mean() == pytest.approx(0.25, abs=0.02)
    assert tokens(LogNormal(0.1, 0), 1, RNG(0)).tolist() == [1]


@pytest.mark.parametrize("text", ["fixed:0", "fixed:0.5", "uniform:0-9"])
def test_lengths_below_a_token_are_refused_and_think_times_of_nothing_are_not(text: str) -> None:
    with pytest.raises(BadInput, match=f"lengths '{text}': .* is less than 1; give at least 1"):
        tokens(parse(text), 3, RNG(0))
    assert parse(text).sample(3, RNG(0)).min() >= 0


def test_a_system_prompt_of_negative_length_is_refused() -> None:
    one = ConstantLength(1)
    shape = Conversations(ArrivalProcess("even", 1.0), one, one, one, one, system_prompts=(400, -5))
    with pytest.raises(BadInput, match="system_prompt is -5; it must be at least 0 tokens"):
        conversations(shape, sessions=2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "uniform:5",
        "lognormal:p50=5",
        "lognormal:sigma=1",
        "normal:mean=5",
        "zipf:3",
        "-5",
        "nan",
    ],
)
def test_lengths_that_make_no_sense(text: str) -> None:
    with pytest.raises(BadInput, match="not understood"):
        parse(text)


@pytest.mark.parametrize(
    ("kind", "rate", "cv"), [("erlang", 1, 1), ("poisson", 0, 1), ("gamma", 1, 0), ("gamma", 1, 99)]
)
def test_arrivals_that_make_no_sense(kind: str, rate: float, cv: float) -> None:
    with pytest.raises(BadInput):
        ArrivalProcess(kind, rate, cv)


def chat(seed: int = 0, **changes):
    shape = {
        "starts": ArrivalProcess("poisson", 2.0),
        "turns": Uniform(1, 5),
        "message": LogNormal(30, 0.5),
        "opening": ConstantLength(50),
        "output": Uniform(5, 40),
        "think_s": LogNormal(8, 0.3),
        "system_prompts": (100, 60),
        **changes,
    }
    return conversations(Conversations(**shape), sessions=40, seed=seed)


def test_conversations_quote_what_was_said_and_answered() -> None:
    trace = chat()
    validate(trace)
    assert trace.requests["session"].nunique() == 40
    for row, before in enumerate(trace.integers("after").tolist()):
        prompt = prompt_tokens(trace, row)
        if before < 0:
            assert len(prompt) in (150, 110)
            continue
        history = prompt_tokens(trace, before) + output_tokens(trace, before)
        assert prompt[: len(history)] == history
        assert len(prompt) > len(history)
    firsts = [prompt_tokens(trace, row)[0] for row in range(len(trace))]
    assert firsts.count((0, 0)) > firsts.count((1, 0)) > 0, "earlier system prompts are more popular"


def test_a_negative_seed_is_refused_by_name() -> None:
    one, arrivals = ConstantLength(1), ArrivalProcess("even", 1.0)
    for generate in (chat, partial(requests, arrivals, one, one, count=2)):
        with pytest.raises(BadInput, match="seed is -1; it must be at least 0"):
            generate(seed=-1)


def test_the_seed_decides() -> None:
    assert chat(3).requests.equals(chat(3).requests)
    assert not chat(3).requests.equals(chat(4).requests)


def test_sessions_end_before_they_grow_too_long() -> None:
    trace = chat(most_tokens=260, system_prompts=())
    total = trace.requests["input_tokens"] + trace.requests["output_tokens"]
    assert total.max() <= 260
    assert len(trace) < len(chat(system_prompts=()))
    with pytest.raises(BadInput, match="no turn fits"):
        chat(most_tokens=20)


def test_retrieval_shares_the_system_prompt_and_popular_documents() -> None:
    shape = Retrieval(
        ArrivalProcess("even", 5.0),
        30,
        Uniform(20, 40),
        Uniform(1, 3),
        ConstantLength(10),
        ConstantLength(5),
        50,
        2.0,
    )
    trace = retrieval(shape, count=200)
    validate(trace)
    prompts = [prompt_tokens(trace, row) for row in range(len(trace))]
    assert len({tuple(prompt[:50]) for prompt in prompts}) == 1
    assert len({prompt[50] for prompt in prompts}) < 30
    assert len({prompt[-1] for prompt in prompts}) == 200


def test_single_requests() -> None:
    trace = requests(ArrivalProcess("poisson", 10.0), Uniform(5, 9), ConstantLength(3), duration_s=60)
    validate(trace)
    assert len(trace) == pytest.approx(600, abs=120)
    assert set(trace.requests["input_tokens"]) == {5, 6, 7, 8, 9}
    with pytest.raises(BadInput, match="nothing arrives"):
        requests(ArrivalProcess("even", 0.001), ConstantLength(1), ConstantLength(1), duration_s=0.001)
    with pytest.raises(BadInput, match="without end"):
        requests(ArrivalProcess("poisson", 1.0), ConstantLength(1), ConstantLength(1))


@pytest.mark.parametrize("asked", [{"duration_s": 1000.0}, {"count": 10**12}])
def test_more_than_memory_holds_is_refused_before_it_is_made(asked: dict) -> None:
    with pytest.raises(BadInput, match="more than the 20,000,000 that are made at once; lower the rate"):
        ArrivalProcess("poisson", 1e12).times_s(RNG(0), **asked)
    assert len(ArrivalProcess("poisson", 1e12).times_s(RNG(0), duration_s=1000.0, count=5)) == 5
