"""Rotary scalings, sharding and loading agree with what transformers' configuration says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagecast.engine import ops
from pagecast.engine.described import model_config
from pagecast.engine.layers import ColumnLinear, RowLinear, Shard
from pagecast.engine.model import Mixture
from pagecast.engine.params import SamplingParams
from pagecast.engine.rope import rotary_table
from pagecast.engine.spec import ModelSpec
from pagecast.kernels import reference
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.model_config import model_from_config
from safetensors.torch import load_file, save_file

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotary_positions(kind: str, model_of: Any, engine_of: Any) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=96)
    engine = engine_of(model.folder, max_model_len=160 if kind == "dynamic" else 96)
    prompt = torch.randint(0, 256, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    spec = ModelSpec.find(str(model.folder))
    length = 160 if kind == "dynamic" else 80
    cos, sin = model.theirs.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    table = rotary_table(spec, length)
    torch.testing.assert_close(table, torch.cat([cos[0, :, :8], sin[0, :, :8]], dim=1), rtol=1e-5, atol=1e-5)
    if kind != "dynamic":  # whose keys, once cached, transformers doesn't turn again
        (completion,) = engine.generate([prompt], SamplingParams(max_tokens=12))
        (output,) = completion.outputs
        expected = model.logits(prompt + output.token_ids)[79:-1].argmax(-1)
        assert output.token_ids == expected.tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_last_layer_computes_nothing_for_tokens_without_logits(
    family: str, model_of: Any, engine_of: Any
) -> None:
    model = model_of(family)
    engine = engine_of(model.folder, max_num_batched_tokens=40, enforce_eager=True)
    last = engine.loop.runner.model.layers[-1]
    tokens: dict[Any, list[int]] = {last.attention.qkv: [], last.attention.o: [], last.mlp: []}
    for part in tokens:
        part.register_forward_hook(lambda part, args, _: tokens[part].append(len(args[0])))
    prompt = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=1))
    assert tokens == {last.attention.qkv: [40, 40, 20], last.attention.o: [0, 0, 1], last.mlp: [1]}
    assert completion.outputs[0].token_ids == [int(model.logits(prompt)[-1].argmax())]


@pytest.mark.parametrize(
    ("family", "changes", "dtype", "folded"),
    [
        ("qwen3", {}, "float32", True),
        ("qwen3", {}, "bfloat16", True),
        ("qwen3", {}, "float16", False),
        ("llama", {"attention_bias": False, "mlp_bias": True}, "float32", False),
        ("llama", {"attention_bias": True, "mlp_bias": False}, "float32", False),
        ("qwen3_moe", {}, "float32", False),
    ],
)
def test_norms_of_many_tokens_are_part_of_products(
    family: str,
    changes: dict[str, Any],
    dtype: str,
    folded: bool,
    model_of: Any,
    engine_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of(family, **changes)
    engine = engine_of(model.folder, dtype=dtype, max_num_batched_tokens=200, enforce_eager=True)
    norms: list[int] = []
    add_rms_norm = ops.add_rms_norm

    def counted(x: torch.Tensor, *rest: Any) -> Any:
        norms.append(x.shape[-2])
        return add_rms_norm(x, *rest)

    monkeypatch.setattr(ops, "add_rms_norm", counted)
    prompt = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=2))
    # Both layers have two norms and the model one; the last layer's first reads all tokens, later ones one.
    whole = [150] if folded else [150, 150, 150]
    assert norms == [*whole, 1, 1, *[1] * 5]
    if dtype == "float32":
        expected = model.logits(prompt + completion.outputs[0].token_ids)[149:-1].argmax(-1)
        assert completion.outputs[0].token_ids == expected.tolist()


def test_older_files_say_the_same_with_rope_scaling(model_of: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
    new = model_of("llama", rope_parameters=rope)
    config = json.loads((new.folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = rotary_table(ModelSpec.find(str(tmp_path)), 50)
    torch.testing.assert_close(old, rotary_table(ModelSpec.find(str(new.folder)), 50))


def test_shares_of_a_layer_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    gate, up, down, bias = torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 6), torch.randn(4)
    x = torch.randn(3, 4)

    def partial(shard: Shard) -> torch.Tensor:
        column = ColumnLinear(4, (6, 6), bias=False, shard=shard)
        row = RowLinear(6, 4, bias=True, shard=shard)
        for part, value in enumerate((gate, up)):
            column.load(part, "weight", value)
        row.load(0, "weight", down)
        row.load(0, "bias", bias)
        one, other = column(x).chunk(2, dim=-1)
        return torch.nn.functional.linear(one * other, row.weight, row.bias)

    whole = partial(Shard())
    torch.testing.assert_close(partial(Shard(0, 2)) + partial(Shard(1, 2)), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'; it runs llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights are int4; the engine runs bf16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8 weights need a multiple of 128 inputs"),
        ({"intermediate_size": 80}, "_proj.weight doesn't fit config.json: needs 80"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2"),
    ],
)
def test_what_cannot_be_run_is_named(
    change: dict[str, Any], message: str, model_of: Any, engine_of: Any, tmp_path: Path
) -> None:
    folder = model_of("llama").folder
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadInput, match=message):
        engine_of(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_positions_beyond_a_scaled_context_are_refused(kind: str, model_of: Any, engine_of: Any) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]}
    model = model_of("llama", rope_parameters=rope, max_position_embeddings=96)
    most = {"linear": 384, "yarn": 256, "llama3": 96}[kind]
    assert engine_of(model.folder, max_model_len=most).limits.max_model_len == most
    with pytest.raises(BadInput, match=f"knows positions up to {most}"):
        engine_of(model.folder, max_model_len=most + 1)


def test_files_that_cannot_be_read_are_named(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    folder = model_of("llama").folder
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    generation = tmp_path / "generation_config.json"
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    generation.write_text('{"eos_token_id": null}')
    assert ModelSpec.find(str(tmp_path)).eos_ids == {7}
    generation.write_text("[]")
    with pytest.raises(BadInput, match=r"generation_config.json: holds no object"):
        ModelSpec.find(str(tmp_path))
    generation.unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": None}))
    with pytest.raises(BadInput, match="rms_norm_eps is None; it must be a number"):
        ModelSpec.find(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(BadInput, match=r"model.safetensors: can't be read"):
        engine_of(tmp_path)


def test_random_weights_need_no_file(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_of("llama").folder / "config.json").read_bytes())
    with pytest.raises(BadInput, match="--random-weights"):
        engine_of(tmp_path)
    (completion,) = engine_of(tmp_path, random_weights=True).generate([[1, 2]], SamplingParams(max_tokens=5))
    assert len(completion.outputs[0].token_ids) == 5
    with pytest.raises(BadInput, match="no such folder"):
        engine_of("Qwen/Qwen3-0.6B")


def test_a_mixture_beside_dense_layers_and_weights_that_do_not_add_up_to_one(
    model_of: Any, engine_of: Any
) -> None:
    changes = {"mlp_only_layers": [0], "norm_topk_prob": False, "num_hidden_layers": 3}
    model = model_of("qwen3_moe", **changes, decoder_sparse_step=1)
    spec = ModelSpec.find(str(model.folder))
    assert (spec.mixtures.layers, spec.mixtures.normalised) == ({1, 2}, False)
    engine = engine_of(model.folder)
    prompt = list(range(40))
    (completion,) = engine.generate([prompt], SamplingParams(max_tokens=24))
    (output,) = completion.outputs
    expected = model.logits(prompt + output.token_ids)[39:-1].argmax(-1)
    assert output.token_ids == expected.tolist()
    described = model_config(spec)
    assert model_from_config(described, spec.facts.name, "meta.json") == spec.facts
    assert (described["mlp_only_layers"], described["norm_topk_prob"]) == ([0], False)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@torch.inference_mode()
def test_experts_are_those_that_transformers_chooses(family: str, model_of: Any) -> None:
    model = model_of(family)
    spec = ModelSpec.find(str(model.folder))
    moe = spec.facts.moe
    assert moe is not None
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    chosen: list[Any] = []
    gates = [layer.mlp.gate for layer in model.theirs.model.layers]
    hooks = [
        gate.register_forward_hook(lambda gate, args, out: chosen.append((args[0], out))) for gate in gates
    ]
    model.logits(ids[0].tolist())
    for hook in hooks:
        hook.remove()
    assert len(chosen) == spec.facts.layers
    for gate, (states, out) in zip(gates, chosen, strict=True):
        logits = torch.nn.functional.linear(states.reshape(-1, spec.facts.hidden), gate.weight)
        experts, weights = reference.choose_experts(logits, moe.active, normalised=spec.mixtures.normalised)
        assert torch.equal(experts, out[2])
        torch.testing.assert_close(weights, out[1])


def test_shares_of_a_mixture_add_up_to_the_whole(model_of: Any) -> None:
    spec = ModelSpec.find(str(model_of("qwen3_moe").folder))
    moe = spec.facts.moe
    assert moe is not None
    torch.manual_seed(0)
    router, x = torch.randn(6, 64), torch.randn(9, 64)
    experts = [(torch.randn(48, 64), torch.randn(48, 64), torch.randn(64, 48)) for _ in range(6)]

    def part(shard: Shard) -> torch.Tensor:
        mixture = Mixture(spec, moe, shard)
        mixture.shard = Shard()  # the sum is made here
        mixture.router.load(0, "weight", router)
        for number, (gate, up, down) in enumerate(experts):
            mixture.gate_up.load(2 * number, "weight", gate)
            mixture.gate_up.load(2 * number + 1, "weight", up)
            mixture.down.load(number, "weight", down)
        return mixture(x, None)

    torch.testing.assert_close(part(Shard(0, 2)) + part(Shard(1, 2)), part(Shard()), rtol=1e-3, atol=1e-3)


def test_a_missing_expert_is_named(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    folder = model_of("mixtral").folder
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=r"layers\.1\.block_sparse_moe\.experts\.3\.w1\.weight is in none"):
        engine_of(tmp_path)
