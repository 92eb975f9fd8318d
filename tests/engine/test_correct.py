"""The engine computes what transformers computes, whatever the scheduler does with a request meanwhile."""

from typing import Any

import pytest
import torch
from pagecast.engine.params import SamplingParams
from pagecast.sim.core.events import EventKind

FAMILIES = ("qwen3", "qwen2", "llama", "mistral")
# Block size: number of blocks (too few for all requests at once), tokens a step, length of the shared prefix.
SHAPES = {16: (22, 48, 50), 64: (9, 100, 150), 256: (8, 300, 480)}


class Watched:
    """The logits an engine drew each token from, by request and position."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        runner, sampler = engine.loop.runner, engine.loop.runner.sampler
        seen: list[torch.Tensor] = []
        sample, bring_back = sampler.sample, runner._bring_back

        def watch_sample(logits: torch.Tensor, rows: Any, positions: torch.Tensor, *rest: Any) -> Any:
            seen[:] = [logits.clone(), positions]
            return sample(logits, rows, positions, *rest)

        def watch_takers(batch: Any, tokens: torch.Tensor) -> Any:
            logits, positions = seen
            for i, taker in enumerate(batch.draws.takers):
                if taker is not None:
                    self.rows[taker.request.id, int(positions[i])] = logits[i]
            return bring_back(batch, tokens)

        monkeypatch.setattr(sampler, "sample", watch_sample)
        monkeypatch.setattr(runner, "_bring_back", watch_takers)


def prompts_with_prefixes(shared: int) -> list[list[int]]:
    """Prompts of several lengths; some share `shared` tokens."""
    generator = torch.Generator().manual_seed(shared)

    def some(n: int) -> list[int]:
        return torch.randint(0, 256, (n,), generator=generator).tolist()

    prefix = some(shared)
    half = prefix[: shared // 2]
    return [prefix + some(7), some(1), prefix + some(30), some(40), half + some(3), prefix + some(7)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_size", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_transformers(
    family: str, block_size: int, depth: int, model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, budget, shared = SHAPES[block_size]
    model = model_of(family)
    sizes = {"block_size": block_size, "num_blocks": blocks, "max_num_batched_tokens": budget}
    engine = engine_of(model.folder, **sizes, pipeline_depth=depth, log_events=True)
    watched = Watched(engine, monkeypatch)
    prompts = prompts_with_prefixes(shared)
    completions = engine.generate(prompts, [SamplingParams(max_tokens=64, n=n) for n in (1, 1, 2, 1, 3, 1)])

    kinds = {event.kind for event in engine.loop.scheduler.events}
    assert {EventKind.PREEMPTED, EventKind.REUSED, EventKind.COPIED} <= kinds
    texts = [(prompt, output) for prompt, c in zip(prompts, completions, strict=True) for output in c.outputs]
    assert len(texts) == 9
    for number, (prompt, output) in enumerate(texts):
        assert (output.finish_reason, len(output.token_ids)) == ("length", 64)
        expected = model.logits(prompt + output.token_ids)
        for position in range(len(prompt), len(prompt) + 64):
            theirs, ours = expected[position - 1], watched.rows[str(number), position]
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
            assert int(theirs.argmax()) == output.token_ids[position - len(prompt)]
