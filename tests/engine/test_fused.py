"""The fused kernels compute what the plain operations compute (interpreted where there is no GPU)."""

import pytest
import torch
from pagecast.engine import fused, ops, sampling
from pagecast.engine.params import SamplingParams
from pagecast.engine.sampling import Sampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("with_residual", [False, True])
def test_add_rms_norm(width: int, with_residual: bool) -> None:
    x, residual, weight = some(5, width), some(5, width, seed=1), some(width, seed=2)
    given = residual if with_residual else None
    expected = ops.add_rms_norm(x, given, weight, 1e-5)
    out = fused.add_rms_norm(
        x.to(DEVICE), None if given is None else given.to(DEVICE), weight.to(DEVICE), 1e-5
    )
    for ours, theirs in zip(out, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_add_rms_norm_of_addends_is_that_of_their_sum() -> None:
    addends, residual, weight = some(3, 5, 96), some(5, 96, seed=1), some(96, seed=2)
    expected = ops.add_rms_norm(addends.sum(0), residual, weight, 1e-5)
    torch.testing.assert_close(ops.add_rms_norm(addends, residual, weight, 1e-5), expected)
    out = fused.add_rms_norm(addends.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-5)
    for ours, theirs in zip(out, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("count", [1, 600])
def test_numbers_are_put_in_their_places(count: int) -> None:
    target = torch.full((30, 40), -7, dtype=torch.int32, device=DEVICE)
    places = torch.randperm(1200, generator=torch.Generator().manual_seed(0))[:count].int().to(DEVICE)
    numbers = torch.arange(count, dtype=torch.int32, device=DEVICE)
    fused.put_numbers(places, numbers, target)
    expected = torch.full((1200,), -7, dtype=torch.int32)
    expected[places.cpu().long()] = numbers.cpu()
    assert torch.equal(target.cpu().view(-1), expected)


def test_silu_mul() -> None:
    x = some(3, 2 * 1100)
    torch.testing.assert_close(fused.silu_mul(x.to(DEVICE)).cpu(), ops.silu_mul(x))


@pytest.mark.parametrize("width", [1100, 4200])
def test_silu_mul_of_a_product_with_states_that_are_still_to_be_normed(width: int) -> None:
    states, weight = 5 * some(3, 48), some(2 * width, 48, seed=1)
    expected = ops.silu_mul(ops.add_rms_norm(states, None, torch.ones(48), 1e-5)[0] @ weight.T)
    product = states @ weight.T
    torch.testing.assert_close(ops.silu_mul(product, states, 1e-5), expected, rtol=1e-4, atol=1e-5)
    out = fused.silu_mul(product.to(DEVICE), states.to(DEVICE), 1e-5)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_place_looks_up_what_tokens_need() -> None:
    tables = torch.tensor([[5, 9], [7, 2], [0, 0]], dtype=torch.int32)
    newest, angles = torch.tensor([11, 12, 13], dtype=torch.int32), some(8, 24)
    rows, ids = torch.tensor([[1, 0, 0, 2], [-1, 40, 41, 0]], dtype=torch.int32)
    positions = torch.tensor([5, 2, 3, -1], dtype=torch.int32)
    given = (rows, ids, positions, newest, tables, angles)
    inputs = ops.place(*given, 4)
    assert inputs.slots.tolist() == [2 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, -1]
    assert inputs.ids.tolist() == [12, 40, 41, 0] and inputs.lens.tolist() == [6, 3, 4, 0]
    for ours, plain in zip(fused.place(*(x.to(DEVICE) for x in given), 4), inputs, strict=True):
        torch.testing.assert_close(ours.cpu(), plain)


@pytest.mark.parametrize("count", [1, 511, 513, 2000])
def test_copied_numbers_are_the_source_s(count: int) -> None:
    source = torch.arange(count + 5, dtype=torch.int32, device=DEVICE)
    target = torch.full((count + 5,), -7, dtype=torch.int32, pin_memory=DEVICE == "cuda")
    fused.copy_numbers(source[:count], target[:count])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert target.tolist() == [*range(count), *[-7] * 5]


def test_sample_draws_the_same_tokens() -> None:
    vocab, rows = 5000, 6
    logits = some(rows, vocab) * 3
    logits[4, 7] = torch.nan
    logits[5, 9] = torch.inf
    numbers = torch.tensor([3, 0, 1, 2, 5, 4], dtype=torch.int32)
    positions = torch.arange(10, 10 + rows, dtype=torch.int32)
    forced = torch.tensor([-1, -1, 17, -1, -1, -1], dtype=torch.int32)
    drawn = []
    for device in ("cpu", DEVICE):
        sampler = Sampler(rows + 1, torch.device(device))
        for row in range(rows):
            params = SamplingParams(temperature=0.0 if row == 3 else 0.8)
            sampler.params[:, row] = torch.from_numpy(sampling.pack(params, seed=row))
        arguments = [each.to(device) for each in (logits, numbers, positions, forced)]
        if len(drawn) == 0:
            tokens = sampler.sample(arguments[0].clone(), *arguments[1:], None)
        else:
            tokens = fused.sample(*arguments, sampler)
        drawn.append((tokens.cpu(), sampler.newest.cpu()))
    (tokens, newest), (ours, our_newest) = drawn
    assert tokens.tolist()[4:] == [-1, -1]
    assert tokens[2] == 17 and tokens[0] == logits[0].argmax()
    torch.testing.assert_close(ours, tokens)
    torch.testing.assert_close(our_newest[:4], newest[:4])
