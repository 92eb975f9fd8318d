"""A model that is small enough for any machine."""

import json
from pathlib import Path

import pytest

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder of a tiny model that has neither weights nor a tokenizer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder
