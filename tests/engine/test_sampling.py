"""Draws follow the distribution that was asked for, and repeat with their seed in whatever company."""

from typing import Any

import numpy as np
import pytest
import torch
from pagecast.engine import sampling
from pagecast.engine.params import SamplingParams
from pagecast.engine.sampling import Sampler
from pagecast.sim.core.errors import BadInput
from scipy import stats


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> np.ndarray:
    """`count` draws from one row of logits [vocab], each at another position of one sequence."""
    sampler = Sampler(1, torch.device("cpu"))
    sampler.params[:, 0] = torch.from_numpy(sampling.pack(params, seed=5))
    rows = torch.zeros(count, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    filtered = torch.arange(count, dtype=torch.int32) if params.filtered else None
    return sampler.sample(logits.repeat(count, 1), rows, positions, rows - 1, filtered).numpy()


def expected(logits: torch.Tensor, temperature: float, keep: int) -> np.ndarray:
    """Probabilities of the `keep` likeliest tokens; the others have none."""
    scaled = logits.double() / temperature
    scaled[scaled < scaled.sort(descending=True).values[keep - 1]] = -torch.inf
    return scaled.softmax(-1).numpy()


@pytest.mark.parametrize(
    ("params", "keep"),
    [
        (SamplingParams(temperature=1.0), 12),
        (SamplingParams(temperature=0.6), 12),
        (SamplingParams(temperature=1.3, top_k=5), 5),
        (SamplingParams(temperature=1.0, top_p=0.75), 3),
        (SamplingParams(temperature=1.0, top_k=4, top_p=0.95), 4),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams, keep: int) -> None:
    logits = torch.log(torch.tensor([30, 28, 20, 7, 4, 3, 2, 2, 1.5, 1, 1, 0.5]) / 100)
    count = 20000
    seen = np.bincount(draws(logits, params, count), minlength=12)
    probabilities = expected(logits.clone(), params.temperature, keep)
    possible = probabilities > 0
    assert seen[~possible].sum() == 0
    assert stats.chisquare(seen[possible], probabilities[possible] * count).pvalue > 1e-3


def test_noise_is_that_of_a_gumbel_distribution() -> None:
    noise = sampling.gumbel(torch.arange(8, dtype=torch.int32), torch.arange(8, dtype=torch.int32), 20000)
    for row in noise.double().numpy():
        assert stats.kstest(row, "gumbel_r").pvalue > 1e-4
    assert abs(np.corrcoef(noise.numpy()) - np.eye(8)).max() < 0.03


def test_a_seed_gives_the_same_text_in_any_company(model_of: Any, engine_of: Any) -> None:
    folder = model_of("llama").folder
    warm = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7, n=2)
    alone = engine_of(folder, max_num_seqs=2).generate([[1, 2, 3]], warm)
    others = [SamplingParams(max_tokens=20, temperature=0.9), SamplingParams(max_tokens=20)]
    among = engine_of(folder, pipeline_depth=0).generate([[4], [9, 9], [1, 2, 3]], [*others, warm])
    texts = [output.token_ids for output in alone[0].outputs]
    assert texts == [output.token_ids for output in among[2].outputs]
    assert texts[0] != texts[1]


def test_top_k_of_one_is_greedy(model_of: Any, engine_of: Any) -> None:
    engine = engine_of(model_of("llama").folder)
    both = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, temperature=2.0, top_k=1)]
    greedy, single = engine.generate([[5, 6], [5, 6]], both)
    assert greedy.outputs[0].token_ids == single.outputs[0].token_ids


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("n", 0), ("max_tokens", 0)]
)
def test_parameters_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(BadInput, match=field):
        SamplingParams(**{field: value}).check()
