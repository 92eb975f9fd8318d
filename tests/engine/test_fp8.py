"""fp8 checkpoints compute what their dequantised weights compute, and fp8 KV what a rounded cache would."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pagecast.engine.fp8_weights import Fp8Weights, fp8_weights
from pagecast.engine.params import SamplingParams
from pagecast.engine.serve import TraceServer
from pagecast.kernels import reference
from pagecast.sim.core.errors import BadInput
from pagecast.sim.costs.calibration.shape import model_of as model_of_run
from pagecast.sim.runs.validate import compare_decisions

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SCHEMES = {
    "block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"),
    "tensor": ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, "weight_scale"),
    "channel": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
            },
            "ignore": ["lm_head"],
        },
        "weight_scale",
    ),
}


class Fp8Linear(torch.nn.Module):
    """A layer of transformers' model with quantised weights and activations."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.scales = weight, scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, x_scales = reference.quantise_groups(x.flatten(0, -2), 128)
        wide = reference.dequantise(numbers, x_scales)
        out = wide @ (self.weight.float() * self.scales).T
        return out.view(*x.shape[:-1], -1)


def quantised(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp8 numbers, scales as a checkpoint holds them, and a scale for every number."""
    rows, columns = {"block": (128, 128), "tensor": weight.shape, "channel": (1, weight.shape[1])}[scheme]
    height, width = -(-weight.shape[0] // rows), weight.shape[1] // columns
    padded = torch.nn.functional.pad(weight, (0, 0, 0, height * rows - weight.shape[0]))
    scales = padded.view(height, rows, width, columns).abs().amax((1, 3)) / 448
    every = scales.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)
    return (weight / every).to(torch.float8_e4m3fn), scales, every


def checkpoint(model: Any, scheme: str, folder: Path) -> Any:
    """Writes an fp8 checkpoint of a model; returns transformers' model that computes with its numbers."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model.folder, folder)
    settings, name = SCHEMES[scheme]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    theirs, tensors = copy.deepcopy(model.theirs), load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.split(".")[-2] in PROJECTIONS]:
        numbers, scales, every = quantised(tensors[key], scheme)
        tensors[key] = numbers
        tensors[key.replace("weight", name)] = scales.reshape(-1)[:1] if scheme == "tensor" else scales
        parent, leaf = key.removesuffix(".weight").rsplit(".", 1)
        setattr(theirs.get_submodule(parent), leaf, Fp8Linear(numbers, every))
    save_file(tensors, folder / "model.safetensors")
    return theirs


def same(ours: torch.Tensor, theirs: torch.Tensor, *, exactly: bool = True) -> None:
    """Equal, or nearly so, on the CPU.

    On a GPU sums are in another order, which rounds some activations otherwise.
    """
    if ours.is_cuda:
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 2e-2
    elif exactly:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_fp8_checkpoints_compute_with_the_numbers_they_hold(
    scheme: str, model_of: Any, engine_of: Any, watched: Any, tmp_path: Path
) -> None:
    theirs = checkpoint(model_of("qwen3", **SIZES), scheme, tmp_path / scheme)
    engine = engine_of(tmp_path / scheme, max_num_batched_tokens=48)
    for ours, layer in zip(engine.loaded.model.layers, theirs.model.layers, strict=True):
        assert ours.mlp.down.weight.dtype == torch.float8_e4m3fn
        x = torch.randn(5, SIZES["hidden_size"])
        here = x.to(engine.loaded.device)
        names = ("q_proj", "k_proj", "v_proj")
        qkv = torch.cat([getattr(layer.self_attn, name)(x) for name in names], dim=-1)
        same(ours.mlp(here, None), layer.mlp(x))
        same(ours.attention.o(here), layer.self_attn.o_proj(x))
        same(ours.attention.qkv(here), qkv, exactly=False)
    logits, errors = watched(engine), []
    prompts = [list(range(3, 40)), [9, 8, 7]]
    completions = engine.generate(prompts, SamplingParams(max_tokens=12))
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = prompt + completion.outputs[0].token_ids
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0].float()
        for position in range(len(prompt), len(ids)):
            ours, exact = logits.rows[str(number), position].float(), expected[position - 1]
            errors.append(float((ours - exact).norm() / exact.norm()))
    # A difference in the last bit rounds some activations to the next fp8 number.
    assert sum(errors) / len(errors) < 0.05


def test_random_weights_by_an_fp8_name_are_quantised(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    model = model_of("qwen3", **SIZES)
    checkpoint(model, "block", tmp_path / "fp8")
    engine = engine_of(tmp_path / "fp8", random_weights=True)
    layer = engine.loaded.model.layers[0].mlp.gate_up
    wide = reference.dequantise(layer.weight.data, layer.scales.data)
    assert 0.019 < float(wide.std()) < 0.021
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


def experts_alone(layer: str, tensors: dict[str, torch.Tensor], x: torch.Tensor, name: str) -> torch.Tensor:
    """Two of six experts per token, each on its own, from the numbers of a checkpoint in blocks."""

    def product(x: torch.Tensor, projection: str) -> torch.Tensor:
        weight = tensors[f"{layer}.{projection}.weight"].float()
        scales = tensors[f"{layer}.{projection}.{name}"].reshape(-1, weight.shape[1] // 128)
        every = scales.repeat_interleave(weight.shape[0] // scales.shape[0], 0).repeat_interleave(128, 1)
        return Fp8Linear(weight, every)(x)

    chances = (x @ tensors[f"{layer}.gate.weight"].T).softmax(-1)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        top = chances[token].topk(2)
        for share, expert in zip((top.values / top.values.sum()).tolist(), top.indices.tolist(), strict=True):
            one, path = x[token : token + 1], f"experts.{expert}"
            gate, up = product(one, f"{path}.gate_proj"), product(one, f"{path}.up_proj")
            out[token] += share * product(torch.nn.functional.silu(gate) * up, f"{path}.down_proj")[0]
    return out


def test_fp8_experts_compute_with_the_numbers_they_hold(
    model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "fp8"
    model = model_of("qwen3_moe", **SIZES, moe_intermediate_size=128)
    shutil.copytree(model.folder, folder)
    settings, name = SCHEMES["block"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.split(".")[-2] in PROJECTIONS]:
        tensors[key], tensors[key.replace("weight", name)], _ = quantised(tensors[key], "block")
    save_file(tensors, folder / "model.safetensors")
    engine = engine_of(folder)
    x = torch.randn(9, SIZES["hidden_size"])
    for number, layer in enumerate(engine.loaded.model.layers):
        assert layer.mlp.gate_up.weight.dtype == torch.float8_e4m3fn
        ours = layer.mlp(x.to(engine.loaded.device), None).cpu()
        theirs = experts_alone(f"model.layers.{number}.mlp", tensors, x, name)
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
    assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
    random = engine_of(folder, random_weights=True).loaded.model.layers[0].mlp.down
    assert 0.019 < float(reference.dequantise(random.weight[0], random.scales[0]).std()) < 0.021


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_block_size": [64, 64]}, "blocks of 128 x 128"),
        ({"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}, "all projections or none"),
        ({"modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}, "all projections or none"),
        ({"ignore": [r"re:.*mlp\.gate_proj$"]}, "all projections or none"),
        ({"quant_method": "awq"}, "int4"),
    ],
)
def test_other_quantisations_are_refused(
    change: dict[str, Any], message: str, model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    checkpoint(model_of("qwen3", **SIZES), "block", tmp_path / "fp8")
    path = tmp_path / "fp8" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(BadInput, match=message):
        engine_of(tmp_path / "fp8")


@pytest.mark.parametrize(
    "module",
    [
        "lm_head",
        "model.embed_tokens",
        "model.layers.3.mlp.gate",
        r"re:.*mlp\.gate$",
        "re:.*lm_head",
        "model.layers.0.mlp.router",
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.q_norm",
    ],
)
def test_modules_that_are_never_quantised_may_be_named(module: str) -> None:
    scheme = {"quant_method": "fp8", "modules_to_not_convert": [module]}
    assert fp8_weights(scheme, "config.json") == Fp8Weights()


def test_fp8_kv_rounds_the_cache_and_nothing_else(model_of: Any, engine_of: Any, watched: Any) -> None:
    model = model_of("qwen3")
    prompts = [list(range(3, 60)), [9, 8, 7]]
    rows = []
    for dtype in ("auto", "fp8"):
        engine = engine_of(model.folder, kv_cache_dtype=dtype, max_num_batched_tokens=48)
        logits = watched(engine)
        engine.generate(prompts, SamplingParams(max_tokens=2))
        rows.append([logits.rows["0", 57], logits.rows["1", 3]])
        if dtype == "fp8":
            assert engine.loaded.kv.dtype == torch.float8_e4m3fn
    for wide, small in zip(*rows, strict=True):
        assert 0 < float((wide - small).norm() / wide.norm()) < 0.1


def test_fp8_kv_is_the_engines_only_other_dtype(model_of: Any, engine_of: Any) -> None:
    with pytest.raises(BadInput, match="kv_cache_dtype"):
        engine_of(model_of("qwen3").folder, kv_cache_dtype="int8")


@pytest.mark.parametrize("least", [1, 10_000])
def test_kernels_read_fp8_kv_as_plain_pytorch_does(
    least: int, model_of: Any, engine_of: Any, watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts over the cache as it is, and over blocks that were widened."""
    from pagecast.engine import attention_triton
    from pagecast.engine.backend import Shape

    monkeypatch.setattr(attention_triton, "LEAST_NEW_TOKENS", least)
    folder = model_of("qwen3", num_hidden_layers=1).folder
    prompts, rows = [list(range(3, 60)), [9, 8, 7], list(range(3, 40))], []
    for kernels in (False, True):
        engine = engine_of(folder, kv_cache_dtype="fp8", block_size=16, max_num_batched_tokens=48)
        runner = engine.loop.runner
        if kernels:
            shape = Shape.of(runner.model.spec, runner.kv, runner.model.dtype, runner.rows.padding + 1)
            runner.backend = runner.batches.backend = attention_triton.TritonBackend(shape)
        logits = watched(engine)
        engine.generate(prompts, SamplingParams(max_tokens=3))
        rows.append(logits.rows)
    assert rows[0].keys() == rows[1].keys()
    for key, plain in rows[0].items():
        assert float((rows[1][key] - plain).norm() / plain.norm()) < 1e-4


def test_a_recorded_fp8_run_knows_its_model_and_cache(
    model_of: Any, engine_of: Any, small_trace: Any, tmp_path: Path
) -> None:
    checkpoint(model_of("qwen3", **SIZES), "block", tmp_path / "fp8")
    engine = engine_of(tmp_path / "fp8", kv_cache_dtype="fp8", num_blocks=30, max_num_batched_tokens=64)
    run = TraceServer(engine, small_trace(3, count=6)).run()
    report = compare_decisions(run)
    assert report.ok, report.first_mismatch
    assert model_of_run(run.meta, "meta.json") == engine.loaded.spec.facts
    assert run.meta["config"]["kv_cache_dtype"] == "fp8"
