"""The kernel tables: each section counts what it should (interpreted where there is no GPU)."""

import os
from collections.abc import Callable

import pytest
import torch
from pagecast.engine import kernel_bench
from pagecast.planner_app.commands.registry import execute
from pagecast.sim.core.errors import BadInput

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measured for real on a GPU")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes on the CPU; a call is made once, and said to take a millisecond."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")

    def once(*calls: Callable[[], object], **_: object) -> float:
        for call in calls:
            call()
        return 1e-3

    monkeypatch.setattr(kernel_bench, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_bench, "DTYPE", torch.float16)
    monkeypatch.setattr(kernel_bench, "QWEN3_8B", kernel_bench.Heads(4, 2, 64, torch.float16))
    monkeypatch.setattr(kernel_bench, "SHAPES", ((2, 40),))
    monkeypatch.setattr(kernel_bench, "seconds", once)


@pytest.mark.usefixtures("tiny")
def test_decode_counts_the_bytes_of_k_and_v_once() -> None:
    heads = kernel_bench.Heads(4, 2, 64, torch.float16)
    ours, theirs = kernel_bench.decode_seconds([40, 40], 16, None, heads)
    assert (ours, theirs) == (1e-3, None)
    assert heads.token_bytes == 2 * 2 * 64 * 2


@pytest.mark.usefixtures("tiny")
def test_prefill_counts_the_products_below_the_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "PREFILL_TOKENS", 96)
    heads = kernel_bench.Heads(4, 2, 64, torch.float16)
    tflops, _ = kernel_bench.prefill_tflops(48, 16, None, heads)
    assert tflops == pytest.approx(2 * (48 * 49 / 2) * 2 * 2 * 64 * 4 / 1e12 / 1e-3)


@pytest.mark.usefixtures("tiny")
def test_a_mixture_is_timed_from_router_to_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "QWEN3_30B_A3B", kernel_bench.ExpertLayerSize(4, 2, 32, 16))
    monkeypatch.setattr(kernel_bench, "MIXTURE_TOKENS", (3,))
    monkeypatch.setattr(kernel_bench, "MIXTURE_LAYERS", 1)
    (row,) = kernel_bench.mixtures(None)
    assert (row.name, row.unit, row.theirs) == ("mixture of 3 tokens", "us", None)
    assert row.ours == pytest.approx(1000)


def test_a_row_says_how_much_faster_we_are() -> None:
    rate = kernel_bench.KernelTime("decode", "GB/s", 4000.0, 2000.0, "half")
    assert rate.markdown() == "| decode | 4,000.0 GB/s | 2,000.0 GB/s (half) | 2.00 |"
    assert kernel_bench.KernelTime("decode", "us", 10.0, 5.0, "half").markdown().endswith("| 0.50 |")
    assert kernel_bench.KernelTime("copy", "GB/s", 1.0).markdown() == "| copy | 1.0 GB/s | | |"


def test_a_section_that_is_not_known_is_named() -> None:
    with pytest.raises(BadInput, match="'decoed' is not known; choose from ceilings, decode"):
        next(kernel_bench.tables(["decoed"]))


def test_without_a_gpu_the_tables_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["bench", "--kernels"]) == 3
    message = "the kernel tables need a CUDA GPU, and this machine has none"
    assert capsys.readouterr().err == f"pagecast: {message}\n"
