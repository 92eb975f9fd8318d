"""A failing request ends alone; a failing step ends the requests of that step."""

from typing import Any

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
