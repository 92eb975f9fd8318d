"""The Triton backend serves what the plain one serves (its kernels interpreted where there is no GPU)."""

from typing import Any

import pytest
import torch
from pagecast.engine import attention
from pagecast.engine.attention_triton import TritonBackend
from pagecast.engine.backend import Shape
from pagecast.engine.batch import graph_sections
from pagecast.engine.params import SamplingParams
from pagecast.sim.core.errors import BadInput, CannotRunHere

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'


# Kernels are interpreted where there is no GPU: a program for each KV head of each layer.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def with_triton(engine: Any) -> Any:
    """The same engine with its attention by the kernels, and without the steps that were captured on a GPU:
    these use the memory of the backend that is replaced."""
    runner = engine.loop.runner
    runner.close()
    runner._graphs = runner._prompt_graphs = None
    runner.batches.graphs, runner.batches.prompt_graphs = [], []
    shape = Shape.of(runner.model.spec, runner.kv, runner.model.dtype, runner.rows.padding + 1)
    runner.backend = TritonBackend(shape)
    runner.batches.backend = runner.backend
    return engine


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_triton_serves_the_same_tokens(family: str, model_of: Any, engine_of: Any) -> None:
    folder = model_of(family, num_hidden_layers=1).folder
    options = {"block_size": 16, "max_num_batched_tokens": 40, "max_num_seqs": 4}
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 256, (50,), generator=generator).tolist()
    prompts = [first, [*first[:33], 5], [7]]
    params = [SamplingParams(max_tokens=4, n=n) for n in (2, 1, 1)]
    plain = engine_of(folder, **options).generate(prompts, params)
    ours = with_triton(engine_of(folder, **options)).generate(prompts, params)
    assert ours == plain
    assert plain[0].outputs[1].cached_tokens == 49


def test_padded_decode_steps_serve_the_same_tokens(model_of: Any, engine_of: Any) -> None:
    """What a CUDA graph replays: fixed places in the packed buffer, and rows that have no tokens."""
    folder = model_of("qwen2").folder
    params = [SamplingParams(max_tokens=n, temperature=0.5, seed=n) for n in (3, 9, 6, 20, 14)]
    prompts = [[n] * (7 * n) for n in range(1, 6)]
    plain = engine_of(folder).generate(prompts, params)
    engine = engine_of(folder)
    runner = engine.loop.runner
    sizes: list[int] = []

    def replay(size: int) -> torch.Tensor:
        sizes.append(size)
        return runner._single_states(size)

    runner._graphs, runner.batches.graphs = replay, [1, 4, 8]
    assert engine.generate(prompts, params) == plain
    assert set(sizes) == {1, 4, 8}


def test_padded_steps_with_prompts_serve_the_same_tokens(model_of: Any, engine_of: Any) -> None:
    """Prompts beside decodes, in chunks and of one token, as a CUDA graph replays them."""
    folder = model_of("qwen3", **SMALL).folder
    options = {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 4}
    params = [SamplingParams(max_tokens=n, temperature=0.5, seed=n) for n in (9, 3, 6, 5, 4)]
    prompts = [[n] * length for n, length in enumerate((20, 1, 90, 33, 7), 1)]
    peer = engine_of(folder, **options)
    engine = with_triton(engine_of(folder, **options))
    runner = engine.loop.runner
    sizes: list[tuple[int, int]] = []

    def replay(size: int) -> torch.Tensor:
        buffer, (_, chunks) = runner.batches.buffer.device, graph_sections(size, min(size, 4))
        sizes.append((size, int((buffer[chunks.lens] > 0).sum())))
        return runner._prompt_states(size)

    runner._prompt_graphs, runner.batches.prompt_graphs = replay, [8, 32]
    assert engine.generate(prompts, params) == peer.generate(prompts, params)
    assert {size for size, _ in sizes} == {8, 32}
    assert all(singles for _, singles in sizes)
    alone = prompts[3][:-2]
    assert engine.generate([alone], params[0]) == peer.generate([alone], params[0])
    assert sizes[-1] == (32, 0)


def test_what_a_backend_cannot_do_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert attention.choose("auto", cpu, 16) == "torch"
    assert attention.choose("auto", gpu, 16) == "triton"
    with pytest.raises(CannotRunHere, match="needs a CUDA GPU"):
        attention.choose("triton", cpu, 16)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert attention.choose("triton", cpu, 16) == "triton"
    with pytest.raises(BadInput, match="choose one of auto, triton, flash-attn, torch"):
        attention.choose("flashinfer", cpu, 16)


def test_triton_verifies_drafts(model_of: Any, engine_of: Any) -> None:
    folder = model_of("qwen3", **SMALL).folder
    options = {"block_size": 16, "max_num_batched_tokens": 300, "max_num_seqs": 4}
    prompts, params = [[5, 6, 7] * 8, [*range(256), 3]], SamplingParams(max_tokens=6)
    plain = engine_of(folder, **options).generate(prompts, params)
    engine = engine_of(folder, **options, speculative_config=NGRAM)
    verified: list[int] = []
    engine.on_end = lambda sequence: verified.append(len(sequence.accepted))
    assert with_triton(engine).generate(prompts, params) == plain
    assert sum(verified) > 4  # whatever comes next, it stood in the second prompt


@pytest.mark.parametrize("dtype", [pytest.param("auto", marks=pytest.mark.slow), "fp8"])
def test_every_kind_of_prefill_is_ready_before_the_first_step(
    dtype: str, model_of: Any, engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that had to compile its attention would stop all requests for seconds."""
    from pagecast.kernels import paged_prefill

    def kind(key: tuple[Any, ...]) -> tuple[Any, ...]:
        """All but the strides of q, which are others where kernels are interpreted."""
        return (*key[:2], *key[3:])

    monkeypatch.setattr(paged_prefill, "_launches", {})
    folder = model_of("qwen3", **SMALL).folder
    options = {"block_size": 16, "max_num_batched_tokens": 400, "max_num_seqs": 4, "kv_cache_dtype": dtype}
    engine = with_triton(engine_of(folder, **options))
    engine.loop.runner.backend.warm_up()
    ready = {kind(key) for key in paged_prefill._launches}
    engine.generate([list(range(250)) * 2, [5], [7] * 40], SamplingParams(max_tokens=2))
    assert {kind(key) for key in paged_prefill._launches} == ready
