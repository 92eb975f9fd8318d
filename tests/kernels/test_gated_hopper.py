"""Gated products of many tokens: which are our own kernel's; on Hopper GPUs they equal float64 ones."""

from collections.abc import Callable

import pytest
import torch
from pagecast.kernels import gated_hopper as module
from pagecast.kernels import gated_plan, reference
from pagecast.kernels.gated_hopper import gated_hopper
from pagecast.kernels.gated_plan import DEPTH, OUTPUTS, full_share, gated_pays, tile_of
from pagecast.kernels.rms_scale import rms_scales
from pagecast.sim.core.errors import BadInput

Error = Callable[[torch.Tensor, torch.Tensor], float]
SHARED_BYTES = 227 * 1024
H200_PROCESSORS = 132
ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("tokens", [1, 128, 129, 5000])
def test_a_tile_fits_a_multiprocessor(tokens: int) -> None:
    tile = tile_of(tokens)
    stage = (2 * OUTPUTS + tile.tokens) * DEPTH * 2 + 16
    assert tile.stages * stage + OUTPUTS * tile.tokens * 2 <= SHARED_BYTES


def test_the_full_share_is_what_is_computed_of_what_there_is_room_for() -> None:
    # 12,288 outputs of Qwen3-8B are 128 tiles.
    assert full_share(256, 24576, H200_PROCESSORS) == 128 / 132
    assert full_share(192, 24576, H200_PROCESSORS) == 0.75 * 128 / 132
    assert full_share(64, 24576, H200_PROCESSORS) == 0.5 * 128 / 132  # of a tile for 128 tokens
    assert full_share(257, 24576, H200_PROCESSORS) == 257 / 512 * 128 / 132
    # 14,336 outputs are 149 and a third of a tile: two rounds for 256 tokens.
    assert full_share(256, 28672, H200_PROCESSORS) == pytest.approx(448 / 3 / 264)
    assert full_share(0, 24576, H200_PROCESSORS) == 0


@pytest.mark.parametrize(
    ("tokens", "outputs", "pays"),
    [
        (256, 24576, True),
        (200, 24576, False),
        (288, 24576, False),
        (512, 24576, True),
        (640, 24576, False),
        (16384, 24576, True),
        (512, 6144, False),
        (1024, 6144, True),
        (512, 28672, False),
        (4096, 28672, True),
    ],
)
def test_steps_that_fill_the_gpu_are_our_own_kernel_s(
    tokens: int, outputs: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As was faster on an H200."""
    monkeypatch.setattr(gated_plan, "runs_hopper_kernels", lambda device: True)
    monkeypatch.setattr(gated_plan, "processors_of", lambda device: H200_PROCESSORS)
    assert gated_pays(tokens, torch.empty(outputs, 8)) == pays


def test_the_cpu_s_products_are_the_library_s() -> None:
    assert not gated_pays(256, torch.empty(24576, 8))


def test_what_does_not_fit_is_refused_before_and_after_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched here: a launch that stands for the kernel counts programs."""

    class Recorded:
        def __init__(self) -> None:
            self.constants = {"TILES": 2}

        def __call__(self, programs: int, *_: object) -> None:
            launched.append(programs)

    launched: list[int] = []
    monkeypatch.setattr(module, "_launches", {})
    monkeypatch.setattr(module, "gated_launch", lambda *_: Recorded())
    monkeypatch.setattr(module, "processors_of", lambda device: 3)
    x, weight = torch.empty(300, 512).bfloat16(), torch.empty(384, 512).bfloat16()
    refused = (
        (x[:, :256].contiguous(), weight),
        (x.half(), weight),
        (x, weight.half()),
        (x.float(), weight.float()),
        (torch.empty(300, 1024).bfloat16()[:, :512], weight),
        (x, torch.empty(384, 1024).bfloat16()[:, :512]),
        (x, weight[:200]),
        (x[:, :256].contiguous(), weight[:, :256].contiguous()),
    )
    for _ in range(2):
        for arguments in refused:
            with pytest.raises(BadInput, match="don't fit each other"):
                gated_hopper(*arguments)
        assert gated_hopper(x, weight).shape == (300, 192)
        assert gated_hopper(x[:20], weight).shape == (20, 192)
        assert gated_hopper(x[:0], weight).shape == (0, 192)
    assert launched == [3, 2, 3, 2]


def test_rms_scales_are_those_of_the_reference() -> None:
    states = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    out = rms_scales(states.cuda() if ON_GPU else states, 1e-5, 8)
    assert out.shape == (8,)
    torch.testing.assert_close(out[:5].cpu(), reference.rms_scale(states, 1e-5)[:, 0])


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    """The gated product in float64; with `eps`, of normed tokens."""
    wide = x.double()
    product = wide @ weight.double().T
    if eps is not None:
        product *= torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("tokens", [1, 97, 128, 129, 256, 257, 1000, 2500])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        pytest.param(6144, 1024, id="Qwen3-0.6B"),
        pytest.param(19456, 2560, id="Qwen3-4B: the last tile is not full"),
        pytest.param(208, 1000, id="the last inputs are not 64"),
        pytest.param(16, 320, id="the smallest"),
    ],
)
def test_equals_the_product_in_float64(
    outputs: int, inputs: int, tokens: int, eps: float | None, dtype: torch.dtype, error: Error
) -> None:
    generator = torch.Generator().manual_seed(tokens + outputs)
    x = torch.randn(tokens, inputs, generator=generator)
    x = (x if eps is None else 3 * x).to(dtype).cuda()
    weight = (torch.randn(outputs, inputs, generator=generator) / inputs**0.5).to(dtype).cuda()
    runs = [gated_hopper(x, weight, eps) for _ in range(10)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert error(runs[0], exact(x, weight, eps)) < 3e-3


@pytest.mark.gpu
def test_a_graph_computes_what_it_is_given_anew() -> None:
    weight = torch.randn(6144, 1024, device="cuda").bfloat16() / 32
    x = torch.randn(1024, 1024, device="cuda").bfloat16()
    gated_hopper(x, weight, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_hopper(x, weight, 1e-6)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, gated_hopper(x, weight, 1e-6))
