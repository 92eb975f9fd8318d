"""Speculation in a replay: what is drafted and accepted, what it costs, and what comes out."""

import json

import pytest
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.roofline import Roofline
from pagecast.sim.machine.gpus import gpu
from pagecast.sim.machine.models import model
from pagecast.sim.replay.simulation import replay
from pagecast.sim.scenario import Scenario
from pagecast.sim.speculation.config import SpeculativeConfig
from pagecast.sim.speculation.costs import DraftShape, SpeculationCosts, drafting_share
from pagecast.traces.schema import Trace, table
from pandas.testing import assert_frame_equal

QWEN = model("Qwen/Qwen3-8B")


def trace(count: int = 12, gap_s: float = 0.4, **columns) -> Trace:
    rows = {
        "arrival_s": [gap_s * number for number in range(count)],
        "input_tokens": [300 + 7 * number for number in range(count)],
        "output_tokens": [60 + 5 * number for number in range(count)],
    }
    return Trace("made", table({**rows, **columns}))


def run(how: str | None, work: Trace | None = None, **fields):
    scenario = Scenario.make({"costs": "roofline", "speculative_config": how, **fields})
    return replay(work or trace(), scenario, check_every=50)


# ---- what is asked for


def test_the_short_form_and_vllms_json_say_the_same():
    short = SpeculativeConfig.parse("eagle:3:0.7")
    fields = {"method": "eagle", "num_speculative_tokens": 3, "acceptance": 0.7}
    assert short == SpeculativeConfig.parse(json.dumps(fields)) == SpeculativeConfig.make(fields)
    assert Scenario.make({"speculative_config": fields}).speculation == short


def test_rates_are_those_of_a_chance_a_list_a_length_or_a_table():
    assert SpeculativeConfig.parse("eagle:3:0.5").rates() == (0.5, 0.25, 0.125)
    rates = {"method": "mtp", "num_speculative_tokens": 3, "synthetic_acceptance_rates": [0.9, 0.5, 0.5]}
    assert SpeculativeConfig.make(rates).rates() == (0.9, 0.5, 0.5)
    length = {"method": "mtp", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.4}
    assert SpeculativeConfig.make(length).rates() == pytest.approx((1.0, 0.4, 0.0))
    published = SpeculativeConfig.parse("mtp:3:glm-5.2-mtp").rates()
    assert 1 + sum(published) == pytest.approx(2.99)


def test_drafts_by_batch_size_keep_the_number_before_a_gap():
    fields = {"method": "eagle", "num_speculative_tokens": 5}
    ranges = [(1, 4, 9), (8, 16, 2)]
    config = SpeculativeConfig.make({**fields, "num_speculative_tokens_per_batch_size": ranges})
    assert [config.drafts(n) for n in (1, 4, 6, 8, 16, 99)] == [5, 5, 5, 2, 2, 2]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("eagle", "write METHOD:DRAFTS:ACCEPTANCE"),
        ("owl:3:0.5", "method is 'owl'"),
        ("eagle:0:0.5", "num_speculative_tokens is 0"),
        ("eagle:3:1.5", "acceptance is 1.5; it must be from 0 to 1"),
        ("eagle:3:gpt", "acceptance 'gpt' is not known; tables are glm-5.2-mtp"),
        ("mtp:4:glm-5.2-mtp", "was measured with 3 draft tokens, not with 4"),
        ('{"method": "eagle", "num_speculative_tokens": 3, "drafts": 3}', "field 'drafts' is not known"),
        ('{"method": "eagle"}', "field 'num_speculative_tokens' is missing"),
        (
            '{"method": "eagle", "num_speculative_tokens": 1, "synthetic_acceptance_rates": [0.1, 0.2]}',
            "2 entries",
        ),
        ("{", "Expecting property name"),
    ],
)
def test_what_can_not_be_is_refused(how, why):
    with pytest.raises(BadInput, match="speculative_config") as error:
        Scenario.make({"speculative_config": how})
    assert why in str(error.value)


def test_ngrams_on_the_cpu_do_not_plan_ahead():
    assert not Scenario.make({"speculative_config": "ngram:3:0.5"}).pipelined
    assert Scenario.make({"speculative_config": "eagle:3:0.5"}).pipelined
    with pytest.raises(BadInput, match="turn async_scheduling off, or take ngram_gpu"):
        run("ngram:3:0.5", async_scheduling=True)


def test_a_profile_without_speculation_is_refused():
    with pytest.raises(BadInput, match="nano-vllm has no speculative decoding"):
        run("ngram:3:0.5", engine="nano-vllm")


# ---- what comes out


@pytest.mark.parametrize("ahead", [False, True])
def test_accepted_drafts_are_those_asked_for_and_save_steps(ahead):
    work = trace(40, 0.05)
    plain = run(None, work, async_scheduling=ahead)
    result = run("eagle:3:0.7", work, async_scheduling=ahead)
    figures = result.summary["speculation"]
    assert figures["mean_acceptance_length"] == pytest.approx(1 + 0.7 + 0.49 + 0.343, rel=0.05)
    assert figures["acceptance_rates_per_position"] == pytest.approx([0.7, 0.49, 0.343], abs=0.05)
    assert result.summary["output_tokens"] == plain.summary["output_tokens"]
    assert result.summary["completed"] == 40
    assert result.summary["steps"] < 0.6 * plain.summary["steps"]
    gap, tpot = result.summary["itl_s"]["mean"], result.summary["tpot_s"]["mean"]
    assert gap / tpot == pytest.approx(figures["mean_acceptance_length"], rel=0.1)


def test_a_replay_is_a_function_of_its_seed():
    first, again, other = (run("mtp:2:0.5", seed=seed) for seed in (1, 1, 2))
    assert_frame_equal(first.requests, again.requests)
    assert first.summary["speculation"] == again.summary["speculation"]
    assert first.summary["speculation"] != other.summary["speculation"]


def test_a_request_accepts_the_same_at_any_load():
    """With equal seeds two loads differ by their load alone."""
    light, heavy = (run("eagle:3:0.6", trace(12, gap)) for gap in (5.0, 0.01))
    names = ("num_draft_tokens", "num_accepted_tokens")
    assert [light.summary["speculation"][n] for n in names] == [
        heavy.summary["speculation"][n] for n in names
    ]


def test_recorded_drafts_are_followed():
    work = trace(1, drafts=["2 2 0"], accepted_drafts=["2 1 0"])
    figures = run("ngram:2:0", work).summary["speculation"]
    # The output's 60 tokens: 1 of the prompt's step, then 3, 2, 1 without draft tokens, the rest rejected.
    assert figures["num_accepted_tokens"] == 3
    assert figures["num_drafts"] == 2 + 60 - 1 - 3 - 2 - 1
    with pytest.raises(BadInput, match="row 0: accepted_drafts: 'x' is no whole number"):
        run("ngram:2:0", trace(1, accepted_drafts=["2 x"]))


def test_ngrams_that_find_nothing_draft_nothing():
    figures = run('{"method": "ngram", "num_speculative_tokens": 3, "acceptance": 1, "match_rate": 0.25}')
    drafts = figures.summary["speculation"]["num_drafts"]
    steps = figures.summary["output_tokens"] - 3 * drafts
    assert drafts / steps == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize("ahead", [False, True])
def test_few_blocks_preempt_and_nothing_is_lost(ahead):
    work = trace(30, 0.01)
    result = run("eagle:4:0.5", work, num_gpu_blocks=70, async_scheduling=ahead)
    assert result.summary["completed"] == 30
    assert result.summary["preemptions"] > 0


def test_a_request_that_never_fits_with_its_lookahead_is_rejected():
    work = trace(1)  # 300 + 60 tokens, of which the last is never computed: 23 blocks; with 10 more 24
    assert run("ngram:10:0.5", work, num_gpu_blocks=23).summary["completed"] == 1
    assert run("eagle:10:0.5", work, num_gpu_blocks=23).summary["rejected"] == 1
    assert run("eagle:10:0.5", work, num_gpu_blocks=24).summary["completed"] == 1


# ---- what it costs


def costs(share: float = 0.0, drafts: int = 3) -> SpeculationCosts:
    config = SpeculativeConfig.parse(f"eagle:{drafts}:0.5")
    return SpeculationCosts(Roofline(QWEN, gpu("H200")), config, share)


def test_verifying_few_rows_costs_little_more_than_decoding_and_many_rows_cost_theirs():
    plain = Roofline(QWEN, gpu("H200"))
    decode = plain.decode_line(4).ns(8000, 2000)
    verify = costs().computing_ns(DraftShape(4, 16, 8000, 2000, (), 4))
    assert decode < verify < 1.1 * decode
    # 256 requests with 3 draft tokens compute 1024 rows: arithmetic, not weights, takes the time.
    decode = plain.decode_line(256).ns(256 * 100, 100)
    verify = costs().computing_ns(DraftShape(256, 1024, 256 * 100, 100, (), 256))
    assert verify > 1.8 * decode
    assert costs().computing_ns(DraftShape(4, 4, 8000, 2000, (), 4)) == plain.decode_line(4).ns(8000, 2000)


def test_verifying_reads_the_cache_once_per_request():
    short = costs().computing_ns(DraftShape(8, 32, 8 * 1000, 1000, (), 8))
    long = costs().computing_ns(DraftShape(8, 32, 8 * 9000, 9000, (), 8))
    plain = Roofline(QWEN, gpu("H200")).decode_line(8)
    assert long - short == pytest.approx(plain.ns(8 * 9000, 9000) - plain.ns(8 * 1000, 1000), abs=2)


def test_drafting_takes_a_pass_over_all_rows_and_one_for_each_further_draft():
    shape = DraftShape(4, 16, 8000, 2000, (), 4)
    computing = costs().computing_ns(shape)
    line = Roofline(QWEN, gpu("H200")).decode_line(4).ns(8000, 2000)
    assert costs(0.1).device_ns(shape) - computing == pytest.approx(0.1 * (computing + 2 * line), abs=2)
    prompts = DraftShape(0, 0, 0, 0, ((100, 0),), 0)
    assert costs(0.1).device_ns(prompts) == costs().computing_ns(prompts)


def test_the_share_of_a_drafting_pass_follows_the_weights():
    share = drafting_share(SpeculativeConfig.parse("eagle:3:0.5"), QWEN, None)
    assert share == pytest.approx(
        (193e6 + 622e6) / 7.57e9, rel=0.02
    )  # a layer and the head, of all but the embedding
    small = model("Qwen/Qwen3-0.6B")
    config = SpeculativeConfig.parse("draft_model:3:0.5")
    assert drafting_share(config, QWEN, small) == pytest.approx(0.6 / 8.2, rel=0.05)
    with pytest.raises(BadInput, match="needs `model`, or `draft_cost`"):
        drafting_share(config, QWEN, None)
    assert drafting_share(SpeculativeConfig.parse("ngram:3:0.5"), QWEN, None) == 0


def test_ngrams_are_verified_as_short_prompts():
    ngram = SpeculationCosts(Roofline(QWEN, gpu("H200")), SpeculativeConfig.parse("ngram:3:0.5"), 0.0)
    shape = DraftShape(3, 6, 4000, 2000, (), 3, ((4, 1500),))
    assert shape.batch == Batch(2, 2500, 2000, ((4, 1500),))
    assert ngram.computing_ns(shape) == Roofline(QWEN, gpu("H200")).device_ns(shape.batch)
    alone = DraftShape(2, 2, 2500, 2000, (), 2)
    assert ngram.computing_ns(alone) == Roofline(QWEN, gpu("H200")).decode_line(2).ns(2500, 2000)
