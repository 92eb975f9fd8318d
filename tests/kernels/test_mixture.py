"""A mixture of experts is what its experts make of their tokens one by one, for any routing."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagecast.kernels import reference
from pagecast.kernels.fp8_linear import quantise_activations
from pagecast.kernels.grouped_gemm import Blocking, Fp8Rows, down, gate_up_silu
from pagecast.kernels.mixture import Plan, mixture, plan_of
from pagecast.kernels.routing import most_tiles, route
from pagecast.sim.core.errors import BadInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Plan(16, Blocking(32, 32, 2, 4), Blocking(64, 16, 2, 4))


def counts_of(experts: int) -> torch.Tensor:
    return torch.zeros(experts, dtype=torch.int32, device=DEVICE)


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(1, 40),
    experts=st.integers(1, 20),
    share=st.floats(0, 1),
    skew=st.sampled_from([0.0, 5.0]),
    parts=st.sampled_from([1, 2]),
    padded=st.booleans(),
)
def test_routes_bring_every_token_to_its_experts(
    seed: int, tokens: int, experts: int, share: float, skew: float, parts: int, padded: bool
) -> None:
    torch.manual_seed(seed)
    active = max(1, round(experts * share))
    parts = parts if experts % parts == 0 else 1
    # Few different values, so that some logits are equal; -0.0 and 0.0 are not told apart.
    logits = (torch.randn(tokens, experts) * 4).round() / 4 + 0.0
    logits[:, 0] += skew
    slots = torch.randint(-1, 3, (tokens,), dtype=torch.int32) if padded else None
    chosen, weights = reference.choose_experts(logits, active, normalised=True)
    local, seen = experts // parts, 0
    for first in range(0, experts, local):
        counts = counts_of(local)
        routes = route(
            logits.to(DEVICE),
            counts,
            active,
            16,
            normalised=True,
            first=first,
            slots=None if slots is None else slots.to(DEVICE),
        )
        torch.testing.assert_close(routes.weights.cpu(), weights)
        rows, tiles = routes.rows.cpu(), routes.tiles[:, :3].tolist()
        assert len(tiles) == most_tiles(tokens * active, local, 16)
        expert_of = {row: e for e, start, end in tiles if e >= 0 for row in range(start, end)}
        assert [e for e, _, _ in tiles if e >= 0] == sorted(e for e, _, _ in tiles if e >= 0)
        assert all(0 < end - start <= 16 for e, start, end in tiles if e >= 0)
        assert counts.cpu().tolist() == [list(expert_of.values()).count(e) for e in range(local)]
        assert sorted(expert_of) == list(range(len(expert_of)))
        for token in range(tokens):
            for place in range(active):
                expert, row = int(chosen[token, place]) - first, int(rows[token, place])
                dead = slots is not None and slots[token] < 0
                if dead or not 0 <= expert < local:
                    assert row == -1
                else:
                    assert expert_of[row] == expert and routes.tokens[row] == token
                    seen += 1
    live = tokens if slots is None else int((slots >= 0).sum())
    assert seen == live * active


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "active", "hidden", "width"),
    [(1, 8, 2, 64, 32), (5, 6, 6, 48, 24), (20, 6, 4, 48, 40), (40, 2, 1, 32, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_as_one_expert_after_another(
    tokens: int,
    experts: int,
    active: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    normalised: bool,
    error: Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    torch.manual_seed(tokens + experts)
    x, logits = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, experts).to(dtype)
    up = (torch.randn(experts, 2 * width, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(experts, hidden, width) / width**0.5).to(dtype)
    slots = torch.arange(tokens, dtype=torch.int32) - 2 if tokens > 15 else None
    wide = [each.double() for each in (x, logits, up, down)]
    expected = reference.mixture(*wide, active, normalised=normalised, slots=slots)
    given = [each.to(DEVICE) for each in (x, logits, up, down)]
    counts = counts_of(experts)
    where = None if slots is None else slots.to(DEVICE)
    plan = SMALL if dtype == torch.float16 else None
    for _ in range(2):  # the second time with what the first left in the counts
        ours = mixture(*given, counts, active, normalised=normalised, slots=where, plan=plan)
        assert not counts.any()
        assert error(ours, expected) < (1e-5 if dtype == torch.float32 else 2e-3)
    if slots is not None:
        assert not ours[:2].any()


def test_experts_of_two_gpus_add_up() -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(20, 32, device=DEVICE), torch.randn(20, 6, device=DEVICE)
    up, down = torch.randn(6, 64, 32, device=DEVICE), torch.randn(6, 32, 32, device=DEVICE)
    whole = mixture(x, logits, up, down, counts_of(6), 2, normalised=True)
    parts = [
        mixture(x, logits, up[i : i + 3], down[i : i + 3], counts_of(3), 2, normalised=True, first=i)
        for i in (0, 3)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 32, 128])
@pytest.mark.parametrize("tokens", [1, 20])
def test_fp8_experts_multiply_the_numbers_they_hold(
    rows: int, tokens: int, error: Callable[[torch.Tensor, torch.Tensor], float]
) -> None:
    """Scales of `rows` outputs each, so of channels, of parts of blocks, and of blocks."""
    torch.manual_seed(tokens + rows)
    x, logits = torch.randn(tokens, 256).half(), torch.randn(tokens, 6)
    weights, scales = [], []
    for outputs, inputs in ((256, 256), (256, 128)):
        wide = torch.randn(6, outputs // rows, rows, inputs // 128, 128) * torch.rand(
            6, outputs // rows, 1, 1, 1
        )
        scale = wide.abs().amax((2, 4)) / 448
        weights.append((wide / scale[:, :, None, :, None]).flatten(1, 2).flatten(2).to(torch.float8_e4m3fn))
        scales.append(scale)
    given = [each.to(DEVICE) for each in (x, logits, *weights)]
    scales = [each.to(DEVICE) for each in scales]
    counts, plan = counts_of(6), plan_of(tokens, 2, 6, torch.float8_e4m3fn)
    routes = route(given[1], counts, 2, plan.tile_rows, normalised=True)
    expert_of = {row: e for e, start, end, _ in routes.tiles.tolist() if e >= 0 for row in range(start, end)}
    experts = torch.tensor([expert_of[row] for row in range(2 * tokens)], device=DEVICE)
    wide = [
        reference.dequantise(weight.flatten(0, 1), scale.flatten(0, 1)).view(weight.shape).double()[experts]
        for weight, scale in zip(given[2:], scales, strict=True)
    ]

    def product(numbers: torch.Tensor, row_scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = reference.dequantise(numbers, row_scales).double()
        return torch.einsum("ri,roi->ro", rows, weight)

    numbers, row_scales = quantise_activations(given[0])
    hidden = gate_up_silu(
        numbers, given[2], routes, counts, plan.up, Fp8Rows(row_scales, scales[0], torch.float32)
    )
    source = routes.tokens.long()
    gate, up = product(numbers[source], row_scales[source], wide[0]).chunk(2, dim=-1)
    bound = 1e-3 if hidden.is_cuda else 1e-4  # a GPU sums in another order
    assert error(hidden, torch.nn.functional.silu(gate) * up) < bound
    numbers, row_scales = quantise_activations(hidden)
    out = down(numbers, given[3], routes, plan.down, Fp8Rows(row_scales, scales[1], torch.float32))
    assert error(out, product(numbers, row_scales, wide[1])) < bound
    whole = mixture(*given, counts, 2, normalised=True, scales=(scales[0], scales[1]))
    expected = reference.mixture(*given, 2, normalised=True, scales=(scales[0], scales[1]))
    # Some activations round to the next fp8 number.
    assert error(whole, expected.double()) < 0.15


def test_fp8_scales_that_do_not_fit_are_named() -> None:
    weight = torch.zeros(2, 256, 128, device=DEVICE).to(torch.float8_e4m3fn)
    scales = torch.ones(2, 2, 1, device=DEVICE), torch.ones(2, 2, 2, device=DEVICE)
    x, logits = torch.zeros(3, 128, device=DEVICE), torch.zeros(3, 2, device=DEVICE)
    with pytest.raises(BadInput, match="each 128 inputs have one"):
        mixture(x, logits, weight, weight[:, :128].contiguous(), counts_of(2), 1, True, scales=scales)


def test_no_token_is_nothing_to_do() -> None:
    up, down = torch.randn(4, 32, 32, device=DEVICE), torch.randn(4, 32, 16, device=DEVICE)
    x, logits = torch.zeros(0, 32, device=DEVICE), torch.zeros(0, 4, device=DEVICE)
    assert mixture(x, logits, up, down, counts_of(4), 2, normalised=True).shape == (0, 32)


def test_shapes_that_do_not_fit_are_named() -> None:
    up, down = torch.randn(4, 32, 32, device=DEVICE), torch.randn(4, 32, 16, device=DEVICE)
    x, logits = torch.zeros(3, 32, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
    with pytest.raises(BadInput, match="5 active"):
        mixture(x, logits, up, down, counts_of(4), 5, normalised=True)
    with pytest.raises(BadInput, match=r"x \(3, 16\).*doesn't fit weight \(4, 32, 32\)"):
        mixture(x[:, :16].contiguous(), logits, up, down, counts_of(4), 2, normalised=True)


def test_plans_follow_the_rows_of_an_expert() -> None:
    rows = [plan_of(tokens, 8, 128, torch.bfloat16).tile_rows for tokens in (1, 32, 256, 2048, 8192)]
    assert rows == sorted(rows) and rows[0] == 16 and rows[-1] == 128
