"""Rotary scalings, sharding and loading agree with what transformers' configuration says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pagecast.engine.layers import ColumnLinear, RowLinear, Shard
from pagecast.engine.params import SamplingParams
from pagecast.engine.rope import rotary_table
from pagecast.engine.spec import ModelSpec
from pagecast.sim.core.errors import BadInput

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
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
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


def test_random_weights_need_no_file(model_of: Any, engine_of: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_of("llama").folder / "config.json").read_bytes())
    with pytest.raises(BadInput, match="--random-weights"):
        engine_of(tmp_path)
    (completion,) = engine_of(tmp_path, random_weights=True).generate([[1, 2]], SamplingParams(max_tokens=5))
    assert len(completion.outputs[0].token_ids) == 5
    with pytest.raises(BadInput, match="no such folder"):
        engine_of("Qwen/Qwen3-0.6B")
