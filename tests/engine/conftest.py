"""Tiny random models of each family, made by transformers, an engine over them, and small traces."""

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pagecast.sim.core.identity.content import own_output
from pagecast.sim.runs.recorded import RecordedRun
from pagecast.traces.schema import Spans, Trace

# Kernels are interpreted where there is no GPU; the choice is made when they are first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

VOCAB = 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_theta": 500.0}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
FAMILIES = tuple(_FAMILIES)


@pytest.fixture(scope="session", autouse=True)
def settled_already() -> Iterator[None]:
    """Engines on the CPU leave the garbage collector alone, but for the test that is about it.

    An engine has it search everything when it starts, which here is the modules of all tests: that takes a
    third of a second, longer than most tests take. On a GPU the search is needed: it gives memory back.
    """
    from pagecast.engine import engine

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            alone = SimpleNamespace(**{name: lambda: None for name in ("collect", "freeze", "unfreeze")})
            patch.setattr(engine, "gc", alone)
        yield


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines use the garbage collector as they do outside of tests."""
    from pagecast.engine import engine

    monkeypatch.setattr(engine, "gc", gc)
    yield
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Model:
    """A model's folder, and transformers' own implementation of it."""

    folder: Path
    theirs: Any

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """transformers' logits after each token: float32 [tokens, vocab]."""
        return self.theirs(torch.tensor([ids])).logits[0].float()


def make_model(folder: Path, family: str, **changes: Any) -> Model:
    """Writes a random model into `folder`: config.json and safetensors, all parameters random."""
    import transformers

    name, fields = _FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **fields, **changes})
    torch.manual_seed(len(family))
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, values in theirs.named_parameters():
            if values.ndim == 1:
                values.uniform_(0.5, 1.5) if "norm" in key else values.normal_(0, 0.2)
    theirs.save_pretrained(folder)
    return Model(folder, theirs)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """`make_model`, each one made once."""
    torch.set_num_threads(1)
    made: dict[str, Model] = {}

    def get(family: str, **changes: Any) -> Model:
        key = f"{family}{sorted(changes.items())}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(family), family, **changes)
        return made[key]

    return get


@pytest.fixture(scope="session")
def model_with_text(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny Qwen3 whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.set_num_threads(1)
    model = make_model(tmp_path_factory.mktemp("text"), "qwen3")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model.folder)
    return model


@pytest.fixture
def engine_of() -> Any:
    """Makes engines in fp32, closed when the test ends; on the GPU where there is one.

    Skips a test that needs more GPUs than there are.
    """
    from pagecast.engine.engine import Engine

    engines = []

    def make(folder: Path, **options: Any) -> Engine:
        chosen = {"device": DEVICE, "dtype": "float32", "num_blocks": 64, "max_num_seqs": 8}
        chosen["max_num_batched_tokens"] = 64
        if 0 < torch.cuda.device_count() < options.get("tensor_parallel_size", 1):
            pytest.skip("needs more GPUs")
        engine = Engine(str(folder), **{**chosen, **options})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def make_trace(seed: int, count: int = 40, horizon_s: float = 0.1) -> Trace:
    """`count` requests over `horizon_s`: shared prefixes, quoted outputs, priorities, impatient clients."""
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, 40, count)
    prompts: list[list[tuple[int, int, int]]] = []
    for i in range(count):
        spans = [(int(rng.integers(3)), 0, int(rng.integers(10, 70)))] if rng.random() < 0.6 else []
        if i > 10 and rng.random() < 0.2:
            earlier = int(rng.integers(i - 10))
            spans = [*prompts[earlier], (own_output(earlier), 0, int(outputs[earlier]))]
        prompts.append([*spans, (100 + i, 0, int(rng.integers(1, 60)))])
    table = pd.DataFrame(
        {
            "arrival_s": np.sort(rng.random(count) * horizon_s),
            "input_tokens": [sum(length for _, _, length in prompt) for prompt in prompts],
            "output_tokens": outputs,
            "priority": rng.integers(0, 3, count),
            "cancel_after_s": np.where(rng.random(count) < 0.15, rng.random(count) * 0.1, np.nan),
        }
    )
    flat = np.array([span for prompt in prompts for span in prompt], np.int64)
    start = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])]).astype(np.int64)
    return Trace("small", table, Spans(start, flat[:, 0].copy(), flat[:, 1].copy(), flat[:, 2].copy()))


@pytest.fixture(scope="session")
def small_trace() -> Callable[..., Trace]:
    """`make_trace`."""
    return make_trace


class Watched:
    """The logits an engine drew each token from, by request and position."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        runner, sampler = engine.loop.runner, engine.loop.runner.sampler
        seen: list[torch.Tensor] = []
        sample, bring_back = sampler.sample, runner._bring_back

        def watch_sample(logits: torch.Tensor, rows: Any, positions: torch.Tensor, *rest: Any) -> Any:
            seen[:] = [logits.clone(), positions]
            return sample(logits, rows, positions, *rest)

        def watch_takers(batch: Any, tokens: torch.Tensor) -> Any:
            logits, positions = seen
            for i, taker in enumerate(batch.draws.takers):
                if taker is not None:
                    self.rows[taker.request.id, int(positions[i])] = logits[i].cpu()
            return bring_back(batch, tokens)

        monkeypatch.setattr(sampler, "sample", watch_sample)
        monkeypatch.setattr(runner, "_bring_back", watch_takers)


def replayed_events(run: RecordedRun) -> list[dict[str, Any]]:
    """Events of the core as it repeats a run."""
    from pagecast.engine.recording import event_line
    from pagecast.sim.runs.validate import DecisionReplay

    replay = DecisionReplay(run, log=True)
    for number in range(len(run.steps)):
        replay.step(number)
    replay.finish()
    assert replay.scheduler.events is not None
    return [event_line(event) for event in replay.scheduler.events]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Watched]:
    """`Watched` for as long as a test lasts."""
    return lambda engine: Watched(engine, monkeypatch)


@pytest.fixture(scope="session")
def core_events() -> Callable[[RecordedRun], list[dict[str, Any]]]:
    """`replayed_events`."""
    return replayed_events
