"""A failing request ends alone; a failing step ends the requests of that step."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
from pagecast.engine.params import SamplingParams
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.check import check
from pagecast.sim.core.errors import BadInput

POISON = 240  # a token whose embedding is not a number
PROMPTS = [[1, 2, 3, *range(20, 50)], [*range(20, 60), POISON], [*range(20, 45), 7], [4] * 30]
SHORT = SamplingParams(max_tokens=8)


def ids(completions: list[Any]) -> list[list[int]]:
    return [output.token_ids for completion in completions for output in completion.outputs]


def idle(engine: Any) -> bool:
    """Nothing is held, and every block is accounted for."""
    check(engine.loop.scheduler)
    return engine.loop.scheduler.memory.used_blocks == 0 and not engine.loop.busy


@pytest.mark.parametrize("depth", [0, 1])
def test_logits_that_are_not_numbers_end_their_request_alone(
    depth: int, model_of: Any, engine_of: Any
) -> None:
    folder = model_of("qwen2").folder
    sound = [0, 2, 3]
    expected = ids(engine_of(folder).generate(PROMPTS, SHORT))
    assert not any(POISON in expected[i] for i in sound)
    engine = engine_of(folder, pipeline_depth=depth)
    engine.loaded.model.embedding.weight[POISON] = torch.nan
    completions = engine.generate(PROMPTS, SHORT)
    outputs = [completion.outputs[0] for completion in completions]
    assert [output.finish_reason for output in outputs] == ["length", "failed", "length", "length"]
    assert "not finite" in outputs[1].reason
    assert [outputs[i].token_ids for i in sound] == [expected[i] for i in sound]
    assert idle(engine)
    (again,) = engine.generate([PROMPTS[2]], SHORT)
    assert again.outputs[0].token_ids == outputs[2].token_ids


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_out_of_memory_ends_its_requests_and_leaves_no_trace(
    depth: int, model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model_of("qwen2").folder, pipeline_depth=depth, max_num_seqs=2)
    launch = engine.loop.runner.launch

    def failing(plan: Any, memory: Any) -> Any:
        if plan.step == 2:
            raise torch.OutOfMemoryError("no room")
        return launch(plan, memory)

    monkeypatch.setattr(engine.loop.runner, "launch", failing)
    completions = engine.generate(PROMPTS, SHORT)
    reasons = [completion.outputs[0].finish_reason for completion in completions]
    assert "failed" in reasons and "length" in reasons
    assert idle(engine)
    clean = engine_of(model_of("qwen2").folder).generate(PROMPTS, SHORT)
    assert ids(engine.generate(PROMPTS, SHORT)) == ids(clean)


def test_a_listener_that_raises_ends_its_own_request(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder)

    def broken(sequence: Sequence, token: int) -> None:
        if len(sequence.output) == 3:
            raise OSError("the client is gone")

    (gone,) = engine.submit(engine.encode([1, 2, 3]), SHORT, listener=broken)
    (other,) = engine.submit(engine.encode([4, 5]), SHORT)
    while engine.loop.step():
        pass
    assert (gone.finish_reason, gone.reason) == ("failed", "OSError: the client is gone")
    assert (other.finish_reason, len(other.output)) == ("length", 8)
    assert idle(engine)


@pytest.mark.parametrize("depth", [0, 1])
def test_cancelled_in_flight(depth: int, model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder, pipeline_depth=depth)
    sequences = [engine.submit(engine.encode(prompt), SHORT)[0] for prompt in PROMPTS]
    for _ in range(3):
        engine.loop.step()
    assert engine.loop.cancel(sequences[0].request.id)
    assert not engine.loop.cancel(sequences[0].request.id)
    while engine.loop.step():
        pass
    assert [sequence.finish_reason for sequence in sequences] == ["cancelled", *["length"] * 3]
    assert idle(engine)
    alone = engine_of(model_of("qwen2").folder).generate(PROMPTS[1:], SHORT)
    assert [sequence.output.tolist() for sequence in sequences[1:]] == ids(alone)


def test_what_can_never_fit_is_refused_and_the_rest_is_served(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder, num_blocks=6, max_model_len=200)
    long, fits, longer = engine.generate([[1] * 150, [2] * 10, [3] * 199], SHORT)
    assert long.outputs[0].finish_reason == longer.outputs[0].finish_reason == "rejected"
    assert long.outputs[0].reason == "needs 10 blocks of 16 tokens; the pool has 6"
    assert longer.outputs[0].reason == "199 prompt + 8 output tokens exceed max_model_len 200"
    assert fits.outputs[0].finish_reason == "length"
    for prompt, message in (([], "empty"), ([256], "outside of 0 to 255"), ([-1], "outside")):
        with pytest.raises(BadInput, match=message):
            engine.generate([prompt], SHORT)
    with pytest.raises(BadInput, match="no tokenizer"):
        engine.generate("some text", SHORT)
    assert idle(engine)


def test_one_bad_prompt_or_parameter_leaves_the_others_unqueued(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder)
    bad_params = SamplingParams(max_tokens=8, top_p=2.0)
    for prompts, params in (([[1, 2], []], SHORT), ([[1, 2], [3]], [SHORT, bad_params])):
        with pytest.raises(BadInput):
            engine.generate(prompts, params)
        assert idle(engine)


@pytest.mark.parametrize("prompt", [[1 << 31], [1 << 70], [1.5], ["a"]])
def test_ids_that_are_no_token_ids_are_refused(prompt: list[Any], model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder)
    with pytest.raises(BadInput, match="token ids"):
        engine.generate([prompt], SHORT)
    with pytest.raises(BadInput, match="token ids outside"):
        engine.encode(np.array([(1 << 32) + 5]))


def test_parameters_of_any_size_are_served(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder)
    wide = SamplingParams(max_tokens=4, temperature=0.7, top_k=1 << 40, seed=3)
    every = SamplingParams(max_tokens=4, temperature=0.7, seed=3)
    assert ids(engine.generate([[1, 2]], wide)) == ids(engine.generate([[1, 2]], every))
    hot = SamplingParams(max_tokens=4, temperature=1e300, top_k=2)
    long = SamplingParams(max_tokens=10**13)
    served, refused = engine.generate([[1, 2], [1, 2]], [hot, long])
    assert served.outputs[0].finish_reason == "length"
    assert refused.outputs[0].finish_reason == "rejected"


def test_a_stream_is_one_text_and_ends_with_the_engine(model_with_text: Any, engine_of: Any) -> None:
    engine = engine_of(model_with_text.folder)
    with pytest.raises(BadInput, match="n is 2"):
        list(engine.stream("some text", SamplingParams(max_tokens=4, n=2)))
    assert idle(engine)
    pieces = engine.stream("some text", SamplingParams(max_tokens=50, ignore_eos=True))
    next(pieces)
    engine.close()
    assert len(list(pieces)) < 50


def test_an_interrupt_leaves_nothing_running(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("qwen2").folder)
    steps = iter(range(4))
    step = engine.loop.step

    def interrupted() -> bool:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    engine.loop.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, SHORT)
    assert idle(engine)
    engine.close()
    with pytest.raises(BadInput, match="closed"):
        engine.generate(PROMPTS, SHORT)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_was_cut_short_leaves_an_engine_that_serves(
    depth: int, error: type[BaseException], model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model_of("qwen2").folder, pipeline_depth=depth)
    execute = engine.loop.runner.execute
    steps = iter(range(3))

    def failing(batch: Any) -> Any:
        if next(steps, None) is None:
            raise error
        return execute(batch)

    monkeypatch.setattr(engine.loop.runner, "execute", failing)
    with pytest.raises(error):
        engine.generate(PROMPTS, SHORT)
    assert idle(engine)
    monkeypatch.undo()
    clean = engine_of(model_of("qwen2").folder).generate(PROMPTS, SHORT)
    assert ids(engine.generate(PROMPTS, SHORT)) == ids(clean)


def test_the_garbage_collector_searches_an_engine_once_it_is_closed(
    unsettled: None, model_of: Any, engine_of: Any
) -> None:
    """Its search would take a tenth of a second, in the middle of a step."""

    def searched(engine: Any) -> bool:
        return any(each is engine for each in gc.get_objects())

    engine = engine_of(model_of("qwen2").folder)
    assert not searched(engine)
    engine.close()
    assert searched(engine)
