"""Engines with packed weights: which products have them, in which steps, and what is refused."""

from typing import Any

import pytest
import torch
from pagecast.engine import loading, ops
from pagecast.engine.described import described
from pagecast.engine.params import SamplingParams
from pagecast.kernels import packed_cuts, packed_hopper
from pagecast.kernels.packed_cuts import PackedCut
from pagecast.kernels.packed_weight import PackedWeight, unpack
from pagecast.sim.core.errors import BadInput

ON_GPU = torch.cuda.is_available()
HIDDEN, WIDTH, VOCAB = 128, 256, 256
LADDER = ((4, PackedCut(2, 16, 0)), (128, PackedCut(3, 128, 0)))
CUTS = {
    ("gated", 2 * WIDTH, HIDDEN): LADDER,
    ("sums", HIDDEN, WIDTH): LADDER,
    ("plain", VOCAB, HIDDEN): LADDER,
}
PROMPT = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1)).tolist()

Calls = list[tuple[str, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Functions stand for the GPU and its kernel; the kinds and tokens of the products that this computes."""
    made: Calls = []

    def multiply(x: torch.Tensor, weight: PackedWeight, cut: PackedCut) -> torch.Tensor:
        kind = "gated" if weight.gated else "sums" if weight.shape[0] == HIDDEN else "plain"
        made.append((kind, len(x)))
        out = torch.nn.functional.linear(x, unpack(weight))
        return ops.silu_mul(out) if weight.gated else out

    monkeypatch.setattr(packed_hopper, "packed_hopper", multiply)
    monkeypatch.setattr(packed_cuts, "_CUTS", CUTS)
    monkeypatch.setattr(loading, "runs_hopper_kernels", lambda _device: True)
    return made


def started(
    model_of: Any, engine_of: Any, *, family: str = "qwen3", tied: bool = False, **options: Any
) -> Any:
    model = model_of(
        family, hidden_size=HIDDEN, intermediate_size=WIDTH, vocab_size=VOCAB, tie_word_embeddings=tied
    )
    fixed: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 200, "enforce_eager": True}
    return engine_of(model.folder, **fixed | options)


def test_steps_of_few_tokens_read_packed_weights(calls: Calls, model_of: Any, engine_of: Any) -> None:
    texts = []
    for packed in (False, True):
        engine = started(model_of, engine_of, pack_weights=packed)
        compiled = set(calls)
        calls.clear()
        (completion,) = engine.generate([PROMPT], SamplingParams(max_tokens=3))
        texts.append(completion.outputs[0].token_ids)
        assert bool(calls) == packed
    assert texts[0] == texts[1]
    layers = len(engine.loop.runner.model.layers)
    layer = [("gated", 1), ("sums", 1)]
    # The prompt's first layers compute all of its 150 tokens, and the last one its last token alone.
    assert calls == [*layer, ("plain", 1), *[*layer * layers, ("plain", 1)] * 2]
    # Each size was computed before, so that no step waits for the compiler.
    assert compiled == {(kind, tokens) for kind in ("gated", "sums", "plain") for tokens in (4, 128)}


def test_a_run_tells_that_weights_were_packed(calls: Calls, model_of: Any, engine_of: Any) -> None:
    assert described(started(model_of, engine_of, pack_weights=True))["config"]["pack_weights"] is True
    assert "pack_weights" not in described(started(model_of, engine_of))["config"]


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"family": "qwen3_moe"}])
def test_a_model_without_a_weight_to_pack_is_told(
    options: dict[str, Any],
    calls: Calls,
    model_of: Any,
    engine_of: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(packed_cuts, "_CUTS", {("gated", 2 * WIDTH, HIDDEN): LADDER})
    with pytest.raises(BadInput, match="pack_weights: this model has no product whose weights can be packed"):
        started(model_of, engine_of, pack_weights=True, **options)


def test_weights_that_12_bits_hold_badly_stay(
    calls: Calls, model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pagecast.engine.model.packing_error", lambda weight: 1e-3 if weight.shape[0] == HIDDEN else 0.0
    )
    model = started(model_of, engine_of, pack_weights=True).loop.runner.model
    assert all(layer.mlp.down.packed is None for layer in model.layers)
    assert all(layer.mlp.gate_up.packed is not None for layer in model.layers)


@pytest.mark.skipif(ON_GPU, reason="the engine would start")
def test_packing_needs_a_hopper_gpu(model_of: Any, engine_of: Any) -> None:
    for gpus in (1, 2):
        with pytest.raises(BadInput, match="pack_weights is for an H100 or H200"):
            engine_of(model_of("qwen3").folder, pack_weights=True, tensor_parallel_size=gpus)
