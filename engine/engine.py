"""The engine as people use it: give it a model and prompts, get texts.

with Engine("models/Qwen3-0.6B") as engine:
    for completion in engine.generate(["Hello"], SamplingParams(max_tokens=32)):
        print(completion.outputs[0].text)
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listed
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pagecast.engine.loading import LoadedModel, check_start, find_device, load
from pagecast.engine.loop import Loop
from pagecast.engine.ngram import NgramDrafter
from pagecast.engine.options import Options
from pagecast.engine.parallel.team import Team
from pagecast.engine.params import SamplingParams
from pagecast.engine.sampling import SEEDS
from pagecast.engine.sequence import Listener, Sequence
from pagecast.engine.shard import WHOLE
from pagecast.engine.text import Growing
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.identity.keys import BlockKeys
from pagecast.sim.core.request import Request

Prompt = str | Listed[int]
_WARM_LENGTHS = (1, 40, 300)
_WARM_LONG_LENGTHS = (700, 1500, 3000, 6000)


@dataclass(frozen=True, slots=True)
class Output:
    """One generated text. `text` is empty where the model has no tokenizer.

    `finish_reason`: "stop", "length", "cancelled", "failed" or "rejected"; `reason` explains the last two.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    cached_tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one prompt: `n` outputs."""

    prompt_token_ids: list[int]
    outputs: list[Output]


class Engine:
    """Serves one model. Options are the fields of `Options`, given by name.

    `model` is a transformers folder, or with `random_weights` a known model's name. Errors: BadInput,
    CannotRunHere (no GPU, too little memory).
    """

    def __init__(self, model: str, *, log_events: bool = False, **options: Any) -> None:
        self.options = Options(**options)
        self.options.check()
        self._loaded: LoadedModel | None = None
        self._team: Team | None = None
        self.on_end: Callable[[Sequence], None] | None = None
        try:
            self._start(model, log_events)
        except BaseException:
            self._end_team()
            raise
        self._random = random.Random(self.options.seed)
        self._count = 0
        self._ends: list[Sequence] | None = None  # sequences that ended, while `generate` runs
        self.settle()

    def _start(self, model: str, log_events: bool) -> None:
        shard = WHOLE
        if self.options.tensor_parallel_size > 1:
            check_start(model, self.options)
            self._team = Team(model, self.options)
            shard = self._team.join(find_device(self.options.device, 0))
        with nullcontext() if self._team is None else self._team.guarded(loading=True):
            self._loaded = load(model, self.options, shard)
            self.limits = self._loaded.limits
            self.tokenizer = self._loaded.tokenizer
            self.loop = Loop(
                self.limits,
                self._loaded.runner,
                ended=self._note_end,
                make_drafter=self._drafter_maker(),
                log_events=log_events,
            )
        if self._team is not None:
            self._team.open(self.loop.runner.step_capacity)
            self.loop.runner.team = self._team

    @property
    def loaded(self) -> LoadedModel:
        """The model and its memory. Errors: BadInput after `close`."""
        if self._loaded is None:
            raise BadInput("the engine is closed; make a new one")
        return self._loaded

    # ---- texts

    def generate(
        self, prompts: Listed[Prompt] | str, params: SamplingParams | Listed[SamplingParams] | None = None
    ) -> list[Completion]:
        """Serves all prompts together and returns what came of each, in order.

        `params` are for all prompts, or one for each. A prompt that can't be served ends by itself: its
        output says why.
        """
        listed: Listed[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        each: Listed[SamplingParams]
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = params
        if len(each) != len(listed):
            raise BadInput(f"{len(each)} sampling parameters for {len(listed)} prompts; give one for each")
        ids = [self.encode(prompt) for prompt in listed]
        for chosen in each:
            chosen.check()
        try:
            groups = [self.submit(prompt, chosen) for prompt, chosen in zip(ids, each, strict=True)]
            return self._complete(ids, groups)
        except BaseException:
            self.end_all()
            raise
        finally:
            self._ends = None

    def _complete(self, ids: list[NDArray[np.int32]], groups: list[list[Sequence]]) -> list[Completion]:
        """Serves these prompts. Outputs are made as sequences end, while the GPU computes the others."""
        numbers = {sequence: number for number, group in enumerate(groups) for sequence in group}
        running = [len(group) for group in groups]
        completions: dict[int, Completion] = {}
        ends = self._ends = [sequence for sequence in numbers if sequence.done]
        while len(completions) < len(groups):
            if not ends:
                self.loop.step()
            while ends:
                number = numbers.get(ends.pop())
                if number is None:
                    continue  # nobody waits for it here
                running[number] -= 1
                if not running[number]:
                    outputs = [self.output(sequence) for sequence in groups[number]]
                    completions[number] = Completion(ids[number].tolist(), outputs)
        return [completions[number] for number in range(len(groups))]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Serves one prompt and yields its text as it grows. Errors: BadInput where it can't be served, and
        for more than one text (`params.n`)."""
        params = params or SamplingParams()
        if params.n > 1:
            raise BadInput(f"n is {params.n}; a stream is one text: leave n out, or use generate")
        pieces: list[str] = []
        growing = Growing(self._needed_tokenizer())

        def listen(sequence: Sequence, token: int) -> None:
            if token not in sequence.stops:
                pieces.append(growing.add(token))

        (sequence,) = self.submit(self.encode(prompt), params, listener=listen)
        try:
            while not sequence.done:
                self.loop.step()
                yield from pieces
                pieces.clear()
            yield from (*pieces, growing.rest())
        finally:
            if not sequence.done:
                self.loop.cancel(sequence.request.id)
        if sequence.finish_reason in ("failed", "rejected"):
            raise BadInput(f"the prompt was not served: {sequence.reason}")

    def warm_up(self) -> None:
        """Serves a few texts, so that what is compiled or loaded on first use is there.

        On a GPU also long ones, alone and behind cached text: their kernels and matrix products are others.
        """
        vocab, longest = self.loaded.spec.facts.vocab, self.loaded.max_model_len
        params = SamplingParams(max_tokens=8, temperature=0.5, n=2, ignore_eos=True)
        prompts = [[(i * n) % vocab for i in range(n)] for n in _WARM_LENGTHS if n + 8 <= longest]
        self.generate(prompts, params)
        if self.loop.runner.device.type != "cuda":
            return
        room = min(longest, self.limits.num_blocks * self.limits.block_size // 4) - 8
        for n in _WARM_LONG_LENGTHS:
            text = [(i * n) % vocab for i in range(n)]
            for cached in (0, n // 2, n - 64):
                if n <= room:
                    self.generate([text[:cached] + text[: n - cached]], params)

    def settle(self) -> None:
        """Keeps Python's garbage collector from searching what lives as long as the engine: such a search
        takes a tenth of a second, in the middle of a step. `close` takes it back."""
        gc.collect()
        gc.freeze()

    # ---- requests

    def submit(
        self,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        *,
        priority: int = 0,
        listener: Listener | None = None,
    ) -> list[Sequence]:
        """Queues a prompt given as token ids; `params.n` sequences. `loop.step` serves them.

        Errors: BadInput for parameters out of range, an empty prompt, and ids beyond the vocabulary.
        """
        params.check()
        self._check_ids(prompt)
        output = params.max_tokens or max(1, self.loaded.max_model_len - len(prompt))
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self.loaded.spec.eos_ids
        seed = self._random.randrange(SEEDS) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for i in range(params.n):
            keys = BlockKeys.of_ids(self.limits.block_size, prompt.astype(np.int64))
            number = self._count
            parent = sequences[0].request if sequences else None
            request = Request(
                str(number), keys, len(prompt), output, priority=priority, index=number, parent=parent
            )
            request.arrival_ns = self.loop.clock.now()
            self._count += 1
            sequence = Sequence(request, prompt, params, seed=seed + i, stops=stops, listener=listener)
            self.loop.submit(sequence)
            sequences.append(sequence)
        return sequences

    def encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """Token ids of a prompt, which may be ids already. Errors: BadInput where there is no tokenizer."""
        if isinstance(prompt, str):
            return np.array(self._needed_tokenizer().encode(prompt), np.int32)
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise BadInput("a prompt is a text or a list of token ids; give a list of prompts")
        if len(ids) and not np.issubdtype(ids.dtype, np.integer):
            raise BadInput(f"token ids are whole numbers of at most 64 bits; the prompt has {ids.dtype}")
        self._check_ids(ids)
        return ids.astype(np.int32)

    def output(self, sequence: Sequence) -> Output:
        """The output of a sequence that has ended."""
        ids = sequence.output.tolist()
        shown = ids[:-1] if sequence.finish_reason == "stop" else ids
        text = self.tokenizer.decode(shown, skip_special_tokens=True) if self.tokenizer is not None else ""
        cached = max(sequence.request.cached_tokens, 0)
        return Output(text, ids, sequence.finish_reason, cached, sequence.reason)

    # ---- the end

    def close(self) -> None:
        """Ends every request and gives the memory back."""
        if self._loaded is None:
            return
        with suppress(Exception):  # an interrupt may have cut a step short: its state goes with the rest
            self.loop.drain()
        on_gpu = self._loaded.device.type == "cuda"
        self._end_team()
        self._loaded = None
        del self.loop
        gc.unfreeze()
        if on_gpu:
            gc.collect()
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _end_team(self) -> None:
        """Ends the other GPUs' processes where there are some."""
        team, self._team = self._team, None
        if team is None:
            return
        if self._loaded is not None and hasattr(self, "loop"):
            with suppress(RuntimeError):  # a GPU whose peer is gone may have failed for good
                self.loop.runner.close()
        team.close()

    @property
    def closed(self) -> bool:
        """Whether the engine was closed: by its user, or because it could not end its requests."""
        return self._loaded is None

    def end_all(self) -> None:
        """Ends every request, after an error; where even that fails, the engine is closed."""
        with suppress(Exception):
            self.loop.drain()
            self.loop.runner.check()
            if not self.loop.busy:
                return
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- small things

    def _drafter_maker(self) -> Callable[[dict[Request, Sequence]], NgramDrafter] | None:
        config = self.options.speculation
        if config is None:
            return None
        return partial(NgramDrafter, config, max_len=self.loaded.max_model_len)

    def _needed_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise BadInput(f"{self.loaded.spec.facts.name} has no tokenizer here; give prompts as token ids")
        return self.tokenizer

    def _check_ids(self, prompt: NDArray[Any]) -> None:
        vocab = self.loaded.spec.facts.vocab
        if not len(prompt):
            raise BadInput("the prompt is empty; give at least one token")
        if prompt.min() < 0 or prompt.max() >= vocab:
            raise BadInput(f"the prompt has token ids outside of 0 to {vocab - 1}")

    def _note_end(self, sequence: Sequence) -> None:
        if self._ends is not None:
            self._ends.append(sequence)
        if self.on_end is not None:
            self.on_end(sequence)
