"""An SLO as a user writes it: what it holds a replay to, and what is said of a bad one."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.planner_app.planner.slo import Slo
from pagecast.sim.core.errors import BadInput
from pagecast.sim.replay import Kept, replay
from pagecast.sim.replay.replicates import summary_figures
from pagecast.sim.scenario import Scenario
from pagecast.traces.bundled import resolve
from pagecast.traces.read import read

NAN = float("nan")


def requests(**columns):
    count = len(next(iter(columns.values())))
    table = {f"{name}_s": np.zeros(count) for name in ("ttft", "tpot", "e2e", "queue", "prefill", "decode")}
    table["state"] = np.full(count, "completed", dtype=object)
    table["first_token_s"] = table["finished_s"] = np.ones(count)
    table["reason"] = np.full(count, "", dtype=object)
    return pd.DataFrame({**table, **columns})


def test_every_term_must_hold():
    slo = Slo.parse("ttft_p50<2s, tpot_max<50ms")
    verdict = slo.verdict(requests(ttft_s=[1.0, 1.0, 5.0], tpot_s=[0.01, 0.02, 0.06]))
    assert not verdict.holds
    assert [term.text for term in verdict.terms] == ["ttft_p50<2s", "tpot_max<50ms"]
    assert [term.holds for term in verdict.terms] == [True, False]
    assert verdict.broken[0].value == 0.06
    assert verdict.broken[0].bound == 0.05


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50), st.floats(0.5, 99.5))
def test_a_percentile_is_the_linear_one(values, percent):
    percent = round(percent, 2)
    verdict = Slo.parse(f"e2e_p{percent}<3min").verdict(requests(e2e_s=values))
    assert verdict.terms[0].value == pytest.approx(np.percentile(values, percent))


def test_goodput_counts_who_kept_every_bound_among_all_who_came():
    table = requests(
        ttft_s=[1.0, 1.0, 3.0, NAN, 1.0],
        tpot_s=[0.01, NAN, 0.01, NAN, 0.01],
        state=["completed", "completed", "completed", "rejected", "cancelled"],
    )
    verdict = Slo.parse("goodput(ttft<2s,tpot<50ms)>=40%").verdict(table)
    assert verdict.terms[0].value == pytest.approx(0.4)
    assert verdict.holds
    assert not Slo.parse("goodput(ttft<2s,tpot<50ms)>0.4").verdict(table).holds


def test_answers_of_one_token_keep_a_tpot_and_nobody_served_keeps_nothing():
    slo = Slo.parse("tpot_p99<50ms")
    assert slo.verdict(requests(tpot_s=[NAN, NAN])).holds
    assert not slo.verdict(requests(tpot_s=[NAN], state=["rejected"])).holds
    assert slo.verdict({"tpot_s.p99": NAN, "completed": 2.0}).holds
    assert not slo.verdict({"tpot_s.p99": NAN, "completed": 0.0}).holds


def test_a_replay_and_its_summary_get_the_same_verdict():
    result = replay(read(resolve("chat"), limit=60), Scenario(costs="roofline"), kept=Kept(steps=False))
    slo = Slo.parse("ttft_p99<2s,tpot_p95<1ms,e2e_mean<30s,queue_max<1us")
    assert slo.verdict(result) == slo.verdict(summary_figures(result))
    for text in ("goodput(ttft<1s)>0.5", "ttft_p97<1s"):
        Slo.parse(text).verdict(result)
        with pytest.raises(BadInput, match="needs the replay's requests"):
            Slo.parse(text).verdict(summary_figures(result))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("itl_p99<40ms", "ITL can't be bounded; tpot can, as in tpot_p99<40ms"),
        ("goodput(itl<40ms)>0.9", "ITL can't be bounded; tpot can, as in tpot_p99<40ms"),
        ("p99_ttft<1s", "did you mean ttft_p99?"),
        ("ttft_p99<1s;tpot_p99<40ms", "separate terms by commas"),
    ],
)
def test_common_slips_are_answered_with_the_right_term(text, words):
    with pytest.raises(BadInput) as caught:
        Slo.parse(text)
    assert str(caught.value).endswith(words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("ttft_p99<2s,", "compares nothing"),
        ("ttft_p99<2", "'2' is no time with a unit"),
        ("ttft_p99<2h", "'2h' is no time with a unit"),
        ("ttft_p99<0s", "above 0"),
        ("ttft_p99>2s", "from above"),
        ("ttft<2s", "lacks a statistic"),
        ("ttft_q99<2s", "'q99' is no statistic"),
        ("ttft_p100<2s", "'p100' is no statistic"),
        ("tftf_p99<2s", "'tftf' is no latency"),
        ("goodput>0.9", "share of good requests"),
        ("goodput()>0.9", "compares nothing"),
        ("goodput(ttft<2s>0.9", "share of good requests"),
        ("goodput(ttft_p99<2s)>0.9", "plain latencies"),
        ("goodput(ttft<2s)<0.9", "share of good requests"),
        ("goodput(ttft<2s)>1.5", "between 0 and 1"),
        ("goodput(ttft<2s)>1", "between 0 and 1"),
        ("goodput(ttft<2s)>x", "between 0 and 1"),
    ],
)
def test_what_cant_be_read_is_one_line_with_what_is_allowed(text, words):
    with pytest.raises(BadInput, match=r"ttft_p99<2s or goodput") as caught:
        Slo.parse(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
