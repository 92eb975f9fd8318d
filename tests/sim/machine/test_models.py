"""Model facts: exact parameter counts, KV bytes for every kind of attention, and what bad files answer."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagecast.sim.core.errors import BadInput
from pagecast.sim.machine.loaded_weights import loaded_weight_bytes
from pagecast.sim.machine.model_config import model_from_config
from pagecast.sim.machine.model_facts import attended_pairs
from pagecast.sim.machine.models import known_models, model

# Total parameters as the Hugging Face hub counts them in each repository's safetensors files (text decoder;
# DeepSeek-V3 without its extra prediction layer).
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-2-7b": 6_738_415_616,
    "meta-llama/Llama-2-70b": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-Nemo-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-2501": 23_572_403_200,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_630_071_296,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b": 999_885_952,
    "microsoft/Phi-3-mini-4k": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "CohereLabs/c4ai-command-r-v01": 34_980_831_232,
    "01-ai/Yi-1.5-34B": 34_388_917_248,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "facebook/opt-125m": 125_239_296,
}
# Active parameters in billions, as the model cards state them.
ACTIVE = {
    "Qwen/Qwen3-30B-A3B": 3.3,
    "Qwen/Qwen3-235B-A22B": 22,
    "Qwen/Qwen3-Coder-480B-A35B": 35,
    "Qwen/Qwen2-57B-A14B": 14,
    "mistralai/Mixtral-8x7B-v0.1": 12.9,
    "deepseek-ai/DeepSeek-V2": 21,
    "deepseek-ai/DeepSeek-V3": 37,
    "moonshotai/Kimi-K2": 32,
    "meta-llama/Llama-4-Scout-17B-16E": 17,
}
# "Model loading took ... GiB" in vLLM's logs, versions 0.8 to 0.22, bf16 or fp16 on one GPU.
LOADED_GIB = {
    "Qwen/Qwen3-8B": 15.2683,
    "Qwen/Qwen3-4B": 7.5552,
    "Qwen/Qwen2.5-7B": 14.2488,
    "meta-llama/Llama-3.1-8B": 14.9889,
    "meta-llama/Llama-3.2-3B": 6.0160,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 2.0513,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert model(name).params == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_of_mixtures_match_their_cards(name: str) -> None:
    assert model(name).active_params / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


@pytest.mark.parametrize("name", LOADED_GIB)
def test_loaded_weights_match_vllms_logs_to_the_fourth_digit(name: str) -> None:
    assert loaded_weight_bytes(model(name)) / 2**30 == pytest.approx(LOADED_GIB[name], abs=2e-4)


def test_mxfp4_experts_are_padded_for_their_kernels() -> None:
    # vLLM 0.19 on an A100: "Model loading took 13.72 GiB" for gpt-oss-20b, 0.9 GiB above the checkpoint.
    assert loaded_weight_bytes(model("gpt-oss-20b")) / 2**30 == pytest.approx(13.72, rel=0.005)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen3-8B", 2 * 36 * 8 * 128 * 2),  # grouped queries
        ("meta-llama/Llama-2-7b", 2 * 32 * 32 * 128 * 2),  # a KV head for every query head
        ("google/gemma-3-1b", 2 * 26 * 1 * 256 * 2),  # one KV head
        ("deepseek-ai/DeepSeek-V3", 61 * (512 + 64) * 2),  # a latent and a rotary key, once
        ("deepseek-ai/DeepSeek-V2-Lite", 27 * (512 + 64) * 2),
        ("openai/gpt-oss-20b", 2 * 24 * 8 * 64 * 2),
    ],
)
def test_kv_bytes_per_token(name: str, expected: int) -> None:
    assert model(name).kv_bytes_per_token() == expected
    assert model(name).kv_bytes_per_token("fp8") == expected // 2


def test_recurrent_layers_have_a_state_that_does_not_grow() -> None:
    facts = model("Qwen/Qwen3-Next-80B-A3B")
    assert facts.params == pytest.approx(79.67e9, rel=1e-3)
    assert facts.active_params == pytest.approx(3.9e9, rel=0.01)
    assert facts.kv_bytes_per_token() == 12 * 2 * 2 * 256 * 2
    state = 36 * (3 * 8192 + 32 * 128 * 128) * 2
    assert facts.kv_bytes_of_sequence(1000) == state + 1000 * facts.kv_bytes_per_token()
    assert facts.state_bytes(2) == state // 2


def test_windowed_layers_stop_growing() -> None:
    gemma = model("google/gemma-3-27b")
    windowed, full = gemma.kv_groups()
    assert (full.layers, windowed.layers, windowed.window) == (10, 52, 1024)
    grown = gemma.kv_bytes_of_sequence(20_000) - gemma.kv_bytes_of_sequence(19_999)
    assert grown == 10 * 2 * 16 * 128 * 2
    assert model("openai/gpt-oss-120b").kv_groups()[0].window == 128
    assert model("mistralai/Mistral-7B-v0.1").kv_groups()[0].window == 4096
    assert model("mistralai/Mistral-7B-v0.3").kv_groups()[0].window == 0


def test_tensor_parallelism_splits_heads_and_copies_what_it_cannot_split() -> None:
    qwen = model("Qwen/Qwen3-8B")  # 8 KV heads
    assert qwen.kv_bytes_per_token(tensor_parallel_size=4) == qwen.kv_bytes_per_token() // 4
    assert qwen.kv_bytes_per_token(tensor_parallel_size=16) == qwen.kv_bytes_per_token() // 8
    deepseek = model("deepseek-ai/DeepSeek-V3")  # the latent is on every GPU
    assert deepseek.kv_bytes_per_token(tensor_parallel_size=8) == deepseek.kv_bytes_per_token()
    assert qwen.weight_bytes(2) == pytest.approx(qwen.weight_bytes() / 2, rel=0.001)
    with pytest.raises(BadInput, match="does not divide the 32 attention heads"):
        qwen.linears(3)


@given(tokens=st.integers(1, 200), context=st.integers(0, 300), window=st.sampled_from([0, 1, 7, 64, 500]))
def test_attended_pairs_equal_counting_them(tokens: int, context: int, window: int) -> None:
    counted = sum(min(context + i, window or 10**9) for i in range(1, tokens + 1))
    assert attended_pairs(tokens, context, window) == counted


def test_flops_of_a_long_chunk_equal_those_of_its_parts() -> None:
    gemma = model("google/gemma-2-9b")
    whole = gemma.attention_flops(8000, 500)
    assert whole == gemma.attention_flops(3000, 500) + gemma.attention_flops(5000, 3500)


def test_flops_per_token_are_two_per_active_matrix_weight() -> None:
    qwen = model("Qwen/Qwen3-30B-A3B")
    weights = qwen.active_params - qwen.embedding_params - qwen.head_params - qwen.small_params()
    assert qwen.matmul_flops_per_token() == 2 * weights


@pytest.mark.parametrize(
    ("typed", "name", "dtype"),
    [
        ("qwen3-8b", "Qwen/Qwen3-8B", "bf16"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B", "bf16"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3", "bf16"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b", "bf16"),
        ("gpt-oss-20b", "openai/gpt-oss-20b", "mxfp4"),
        ("deepseek-r1", "deepseek-ai/DeepSeek-R1", "fp8"),
    ],
)
def test_names_people_type(typed: str, name: str, dtype: str) -> None:
    assert (model(typed).name, model(typed).weight_dtype) == (name, dtype)


def test_a_weight_format_in_the_name_is_heeded() -> None:
    plain, fp8, awq = (model(n) for n in ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B-AWQ"))
    assert fp8.params == plain.params
    assert 0.5 < fp8.weight_bytes() / plain.weight_bytes() < 0.55
    assert 0.25 < awq.weight_bytes() / plain.weight_bytes() < 0.33


def test_an_unknown_model_is_answered_with_the_nearest_and_the_way_out() -> None:
    with pytest.raises(BadInput, match=r"unknown model 'qwen4-8b'; nearest: Qwen/Qwen3-8B.*config\.json"):
        model("qwen4-8b")


def test_every_model_of_the_table_can_be_read_and_sized() -> None:
    for name in known_models():
        facts = model(name)
        assert facts.weight_bytes() > 0 and facts.kv_bytes_per_token() > 0 and facts.max_position >= 2048
        recurrent = facts.recurrent.layers if facts.recurrent else 0
        blocks = sum(len(shape.windows) for shape in facts.attentions) + recurrent
        if facts.model_type == "nemotron_h":  # an MLP is a layer of its own
            blocks += facts.dense_mlps + (facts.moe.layers if facts.moe else 0)
        assert blocks == facts.layers
        # Biases and norms add less than 1%.
        assert facts.small_params() < 0.01 * facts.params


def test_the_shared_table_agrees(shared: Path) -> None:
    for name, config in json.loads((shared / "llm-models.json").read_text()).items():
        facts = model(name)
        assert facts.hidden == config["hidden_size"] and facts.vocab == config["vocab_size"]
        assert facts.attention.kv_heads == config["num_key_value_heads"]
        assert facts.tied == config["tie_word_embeddings"]


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

MOE = {**CONFIG, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write(folder: Path, config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


def test_a_folder_is_read_and_named_after_itself(tmp_path: Path) -> None:
    facts = model(write(tmp_path / "my-model", CONFIG))
    attention = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 16
    assert facts.params == 256 * 64 + 2 * (attention + 3 * 64 * 128 + 2 * 64) + 64
    assert facts.name == "my-model" and not facts.notes


def test_nested_text_config_and_quantization_are_read(tmp_path: Path) -> None:
    outer = {
        "model_type": "shell",
        "text_config": CONFIG,
        "vision_config": {"hidden_size": 7},
        "quantization_config": {"quant_method": "fp8"},
    }
    facts = model(write(tmp_path / "m", outer))
    assert facts.hidden == 64 and facts.weight_dtype == "fp8"
    assert "vision" in facts.notes[0]


def test_an_unknown_architecture_is_read_as_llama_and_says_so(tmp_path: Path) -> None:
    facts = model(write(tmp_path / "m", {**CONFIG, "model_type": "newthing", "hidden_act": "silu"}))
    assert "newthing" in facts.notes[0] and facts.params > 0


@pytest.mark.parametrize("activation", [{}, {"hidden_act": "relu2"}, {"activation_function": "gelu_new"}])
def test_an_unknown_architecture_whose_mlp_may_have_no_gate_is_refused(
    tmp_path: Path, activation: dict[str, str]
) -> None:
    folder = write(tmp_path / "m", {**CONFIG, "model_type": "newthing", **activation})
    with pytest.raises(BadInput, match="may have a gate or none; assume_dense reads it with a gate"):
        model(folder)
    assert model(folder, assume_dense=True).gated


def test_models_without_a_gate_have_an_mlp_of_two_matrices(tmp_path: Path) -> None:
    # transformers 5.24's defaults, of which its ArceeForCausalLM has 4,022,766,080 parameters.
    config = {
        "model_type": "arcee",
        "hidden_act": "relu2",
        "hidden_size": 2560,
        "intermediate_size": 18432,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    assert model(write(tmp_path / "m", config)).params == 4_022_766_080


@pytest.mark.parametrize(
    ("whole", "decoder", "tied"),
    [(None, None, False), (True, None, True), (False, True, False), (True, False, False), (True, True, True)],
)
def test_a_projection_is_tied_where_neither_the_whole_nor_the_decoder_says_no(
    tmp_path: Path, whole: bool | None, decoder: bool | None, tied: bool
) -> None:
    field = "tie_word_embeddings"
    text = {k: v for k, v in CONFIG.items() if k != field} | ({field: decoder} if decoder is not None else {})
    config = {"model_type": "qwen3_vl", "text_config": text} | ({field: whole} if whole is not None else {})
    assert model(write(tmp_path / "m", config)).tied is tied


def test_the_layer_types_of_draft_layers_may_follow_those_of_the_decoder(tmp_path: Path) -> None:
    # As in Step-3.5-Flash's config.json: 48 types for 45 layers and 3 draft layers.
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = {**CONFIG, "sliding_window": 512, "num_nextn_predict_layers": 1}
    facts = model(write(tmp_path / "m", {**config, "layer_types": types}))
    assert facts.attention.windows == (0, 512)
    with pytest.raises(BadInput, match="4 entries for 2 layers"):
        model(write(tmp_path / "n", {**config, "layer_types": [*types, "full_attention"]}))


@pytest.mark.parametrize("tower", ["audio_config", "vision_config", "audio_encoder_config"])
def test_a_tower_that_is_not_counted_is_said(tmp_path: Path, tower: str) -> None:
    facts = model(write(tmp_path / "m", {**CONFIG, tower: {"hidden_size": 1024, "num_hidden_layers": 24}}))
    assert any("only the text decoder is counted" in note for note in facts.notes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "hidden_size": -1}, "hidden_size is -1; it must be a positive integer"),
        ({**CONFIG, "num_hidden_layers": "36"}, "num_hidden_layers is '36'"),
        ({k: v for k, v in CONFIG.items() if k != "vocab_size"}, "vocab_size is missing"),
        ({**CONFIG, "model_type": "jamba"}, "recurrent layers"),
        ({**CONFIG, "model_type": "nemotron_h"}, "layers_block_type is missing"),
        ({**CONFIG, "model_type": "qwen3_next"}, "linear_num_key_heads is missing"),
        ({**CONFIG, "layer_types": ["linear_attention", "full_attention"]}, "recurrent layers"),
        ({**CONFIG, "quantization_config": {"quant_method": "odd"}}, "quant_method 'odd' is unknown"),
        ({**CONFIG, "sliding_window": "abc"}, "sliding_window is 'abc'; it must be a whole number"),
        ({**CONFIG, "sliding_window": -5}, "sliding_window is '-5'; it must be a whole number"),
        ({**CONFIG, "sliding_window": 512, "max_window_layers": "a"}, "max_window_layers is 'a'"),
        ({**CONFIG, "sliding_window": 512, "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({**CONFIG, "layer_types": 7}, "layer_types is '7'; it must be a list of names"),
        ({**CONFIG, "num_key_value_heads": 3}, "it must be a number that divides the 4 attention heads"),
        ({**CONFIG, "torch_dtype": "float99"}, "torch_dtype is 'float99'; it must be one of bfloat16"),
        ({**MOE, "mlp_only_layers": 5}, "mlp_only_layers is '5'; it must be a list of layer numbers"),
        ({**MOE, "n_shared_experts": "x"}, "n_shared_experts is 'x'"),
        ({**MOE, "num_experts_per_tok": 9}, "9 experts per token, but there are only 8 experts"),
        (
            {**CONFIG, "quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
            "config_groups is not made of groups",
        ),
        ({**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits is '3'"),
        ({**CONFIG, "num_hidden_layers": 10**9}, "more than the 10,000 that are read"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": 64,', "config.json:1: not valid JSON"),
        ("[1]", "holds a list, not an object"),
    ],
)
def test_a_bad_config_is_one_line_that_names_file_and_field(tmp_path, config, message: str) -> None:
    folder = write(tmp_path / "m", config)
    with pytest.raises(BadInput) as caught:
        model(folder)
    text = str(caught.value)
    assert message in text and folder in text and "\n" not in text


FIELDS = (
    *MOE,
    "sliding_window",
    "layer_types",
    "max_window_layers",
    "mlp_only_layers",
    "n_shared_experts",
    "first_k_dense_replace",
    "decoder_sparse_step",
    "moe_layer_freq",
    "torch_dtype",
    "text_config",
    "sliding_window_pattern",
    "kv_lora_rank",
    "quantization_config",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 600) | st.floats() | st.sampled_from(["", "x", "gptq"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["quant_method", "bits", "config_groups", "weights"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)


@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_whatever_a_config_holds_it_is_sized_or_refused_in_one_line(changes: dict) -> None:
    refused = ""
    try:
        facts = model_from_config({**MOE, **changes}, "m", "config.json")
        assert facts.params > 0 and facts.kv_bytes_per_token() > 0
    except BadInput as error:
        refused = str(error)
    assert "\n" not in refused and (not refused or refused.startswith("config.json: "))


@pytest.mark.parametrize("name", ["foo/bar", "~nouser/x", "a" * 5000, "a\0b"])
def test_a_name_that_is_like_none_known_says_what_to_give(name: str) -> None:
    with pytest.raises(BadInput, match=r"; give a folder that holds the model's config\.json$"):
        model(name)


def test_a_folder_without_a_config_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json: no such file"):
        model(str(tmp_path))


FOUR_BITS = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}


def group(weights: dict, *targets: str) -> dict:
    return {"targets": list(targets or ["Linear"]), "weights": weights}


def bits_of(config: dict, **more) -> dict[str, float]:
    return dict(model_from_config(config, "m", "config.json", **more).weight_bits)


def test_a_key_that_nobody_read_is_named_and_can_be_assumed_away(tmp_path: Path) -> None:
    odd = {**CONFIG, "compress_ratios": [0, 4], "hidden_act": "silu", "rope_theta": 1e6}
    folder = write(tmp_path / "m", odd)
    with pytest.raises(BadInput, match=r"compress_ratios may change attention, .*assume_dense"):
        model(folder)
    facts = model(folder, assume_dense=True)
    assert facts.params == model(write(tmp_path / "n", CONFIG)).params
    assert "READ WITHOUT compress_ratios" in facts.notes[0]


def test_modules_that_a_checkpoint_leaves_out_keep_16_bits() -> None:
    scheme = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group(FOUR_BITS)},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    bits = bits_of({**MOE, "quantization_config": scheme})
    assert bits == {"qkv": 16, "o": 16, "expert_up": 4.5, "expert_down": 4.5}
    # A glob over one of two layers: half of the matrices' weights keep 16 bits.
    half = {**scheme, "ignore": ["model.layers.0.self_attn*"]}
    assert bits_of({**MOE, "quantization_config": half})["o"] == (16 + 4.5) / 2


def test_formats_may_differ_by_module() -> None:
    fp8, nvfp4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "float", "group_size": 16}
    scheme = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": group(nvfp4), "b": group(fp8, "re:.*self_attn.*")},
    }
    bits = bits_of({**CONFIG, "quantization_config": scheme})
    assert bits == {"qkv": 8.002, "o": 8.002, "up": 4.5, "down": 4.5}
    listed = {
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": {"model.layers.1.mlp.down_proj": {"quant_algo": "MXFP8"}},
    }
    bits = bits_of({**CONFIG, "quantization_config": listed})
    assert bits == {"qkv": 16, "o": 16, "up": 16, "down": (16 + 8.25) / 2}


def test_what_lies_beside_a_config_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG)
    plain = model(folder)
    beside = {
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    }
    (tmp_path / "m" / "hf_quant_config.json").write_text(json.dumps(beside))
    quantized = model(folder)
    assert (
        quantized.weight_dtype == "nvfp4" and quantized.kv_bytes_per_token() == plain.kv_bytes_per_token() / 2
    )
    assert quantized.kv_bytes_per_token("bf16") == plain.kv_bytes_per_token()
    index = {"metadata": {"total_size": 123_456_789}, "weight_map": {"model.layers.2.eh_proj.weight": "a"}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    sized = model(folder)
    assert sized.weight_bytes() == 123_456_789 and "draft layers" in sized.notes[-1]


LATENT = {
    **CONFIG,
    "model_type": "deepseek_v32",
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 32,
}


def test_an_indexer_keeps_a_key_of_its_own_for_each_token() -> None:
    facts = model_from_config(LATENT, "m", "config.json")
    assert facts.kv_bytes_per_token() == 2 * (576 * 2 + 132)  # a key of 128 bytes and a scale of 4
    assert facts.kv_bytes_per_token("fp8") == 2 * (576 + 132)
    assert facts.kv_bytes_per_token("fp8_ds_mla") == 2 * (656 + 132)
    shared = model_from_config({**LATENT, "indexer_types": ["full", "shared"]}, "m", "config.json")
    assert shared.kv_bytes_per_token() == 2 * 576 * 2 + 132


def test_full_layers_may_have_heads_of_their_own() -> None:
    config = {
        **CONFIG,
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }
    windowed, full = model_from_config(config, "m", "config.json").kv_groups()
    assert (windowed.window, windowed.elements_per_token) == (32, 2 * 2 * 16)
    assert (full.window, full.elements_per_token) == (0, 2 * 32)
    shapes = {ln.name: ln for ln in model_from_config(config, "m", "config.json").linears()}
    assert shapes["qkv"].outputs == 4 * 32 + 32  # the last shape's: queries, and keys that serve as values


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        # Convolution of 2 x 2 x 8 + 4 x 8 channels over 3 tokens in bf16; 4 heads of 8 x 8 in float32.
        (
            {
                "model_type": "qwen3_5_text",
                "full_attention_interval": 2,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "mamba_ssm_dtype": "float32",
            },
            64 * 3 * 2 + 4 * 8 * 8 * 4,
        ),
        (
            {
                "model_type": "kimi_linear",
                "linear_attn_config": {"kda_layers": [1], "num_heads": 4, "head_dim": 8},
            },
            3 * 32 * 3 * 2 + 4 * 8 * 8 * 4,
        ),
        (
            {
                "model_type": "nemotron_h",
                "num_hidden_layers": 4,
                "hybrid_override_pattern": "M-*-",
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "n_groups": 2,
                "ssm_state_size": 16,
                "mamba_ssm_cache_dtype": "float32",
            },
            (32 + 2 * 2 * 16) * 3 * 2 + 32 * 16 * 4,
        ),
    ],
    ids=["gated delta rule", "Kimi's", "Mamba 2"],
)
def test_states_of_each_form_of_recurrent_layer(changes: dict, state: int) -> None:
    facts = model_from_config({**CONFIG, **changes}, "m", "config.json")
    assert facts.recurrent and facts.recurrent.layers == 1 and facts.state_bytes() == state


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"moe_layer_freq": [0, 1]}, 1),
        ({"mlp_layer_types": ["sparse", "sparse"]}, 2),
        ({"num_experts_per_tok": None, "top_k_experts": 2}, 2),
    ],
)
def test_ways_to_say_which_layers_have_experts(changes: dict, sparse: int) -> None:
    facts = model_from_config({**MOE, **changes}, "m", "config.json")
    assert facts.moe and (facts.moe.layers, facts.moe.active, facts.dense_mlps) == (sparse, 2, 2 - sparse)


@pytest.mark.parametrize(
    ("name", "params"),  # as transformers 5.24 makes them, and of Llama 4 as a start's log has them
    [
        ("google/gemma-3-27b", 423_060_336),
        ("mistralai/Mistral-Small-3.1-24B-2503", 438_958_080),
        ("meta-llama/Llama-4-Scout-17B-16E", 0.870e9),
    ],
)
def test_towers_of_models_known_by_name_are_counted(name: str, params: float) -> None:
    assert model(name).tower_params == pytest.approx(params, rel=0.03) and not model(name).notes


def test_a_tower_is_counted() -> None:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 2,
        "patch_size": 4,
        "temporal_patch_size": 2,
    }
    whole = {
        "model_type": "qwen3_vl",
        "text_config": {**CONFIG, "model_type": "qwen3_vl_text"},
        "vision_config": vision,
    }
    facts = model_from_config(whole, "m", "config.json")
    blocks, merged = 2 * (4 * 32 * 32 + 2 * 32 * 64), 32 * 4
    assert facts.tower_params == blocks + 3 * 16 * 2 * 32 + 4 * (merged * merged + merged * 64)
    assert not facts.notes


def test_what_configurations_usually_say_beside_is_no_error(tmp_path: Path) -> None:
    usual = {
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "attention_dropout": 0.1,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "max_window_layers": 28,
        "embedding_multiplier": 12.0,
    }
    whole = {"model_type": "shell", "select_layer": -1, "text_config": {**CONFIG, **usual}}
    assert model(write(tmp_path / "m", whole)).params == model(write(tmp_path / "n", CONFIG)).params


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_shared_layers": 10}, {"hidden_size_per_layer_input": 256}, {"engram_layer_ids": [1]}],
)
def test_what_changes_caches_or_weights_and_is_not_known_is_refused(changes: dict) -> None:
    with pytest.raises(BadInput, match=next(iter(changes))):
        model_from_config({**CONFIG, **changes}, "m", "config.json")
