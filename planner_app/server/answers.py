"""Answers of the simulated backend: which tokens a prompt is continued with, and how many."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash
from pagecast.planner_app.server.generation import Generation
from pagecast.planner_app.server.text import GrowingText
from pagecast.planner_app.server.tokenizer import Tokenizer
from pagecast.sim.core.identity.content import tokens
from pagecast.traces.arrays import Ints

Mode = Literal["random", "echo"]
_NAMES = 1 << 62


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long an answer is whose request sets no `max_tokens`: log-normal, of this mean and spread.

    `spread` is the standard deviation of the length's logarithm; 0: always the mean.
    """

    mean: int = 256
    spread: float = 0.6

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        middle = math.log(self.mean) - self.spread**2 / 2
        return max(1, round(rng.lognormvariate(middle, self.spread)))


class Answers:
    """Makes up answers. `mode` "random": words drawn at random; "echo": the prompt's own tokens, as often as
    `min_tokens` asks for.

    An answer has `max_tokens` tokens and ends for its length, save where a stop string or token ends it
    before. Where the client sets no `max_tokens`, its length is drawn from `lengths`. The same prompt has
    the same answer at temperature 0 or with the same `seed`.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, mode: Mode = "random", lengths: Lengths | None = None, seed: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self._mode = mode
        self._lengths = lengths or Lengths()
        self._random = random.Random(seed)

    def write(self, generation: Generation, max_model_len: int) -> Ints:
        """Decides the answer: sets `tokens` and `ending` of the generation. Returns the token ids, int64."""
        sampling = generation.sampling
        room = max(max_model_len - len(generation.prompt), 1)
        name = self._name(generation)
        most = min(sampling.max_tokens or room, room)
        ending = "length"
        if sampling.max_tokens is None and not sampling.ignore_eos:
            length = max(self._lengths.draw(random.Random(name)), sampling.min_tokens)
            if length < most:
                most, ending = length, "stop"
        ids = self._made_up(name, most)
        if self._mode == "echo":
            echoed = generation.echo or generation.prompt
            length = max(len(echoed), sampling.min_tokens)
            if length < most:
                most, ending = length, "stop"
            ids = np.resize(np.asarray(echoed, np.int64), most)
        if generation.form:
            ids = np.asarray(generation.form[:most], np.int64)
            ending = "stop" if len(generation.form) <= most else "length"
        elif sampling.stop or sampling.stop_token_ids:
            ids, ending = self._cut(generation, ids, ending)
        generation.tokens = ids.tolist()
        generation.ending = ending
        return ids

    def _name(self, generation: Generation) -> int:
        """Names an answer's text: what it depends on besides its length."""
        sampling = generation.sampling
        if sampling.seed is None and sampling.temperature > 0:
            return self._random.randrange(_NAMES)
        prompt = np.asarray(generation.prompt, np.int64).tobytes()
        choice = generation.choice if sampling.temperature > 0 else 0
        mark = f"{sampling.seed} {choice} {generation.adapter} ".encode()
        return xxhash.xxh3_64_intdigest(mark + prompt) % _NAMES

    def _made_up(self, name: int, count: int) -> Ints:
        words = self.tokenizer.words
        indices = tokens(name, 0, count) % np.uint64(len(words))
        return words[indices.astype(np.int64)]

    def _cut(self, generation: Generation, ids: Ints, ending: str) -> tuple[Ints, str]:
        """The answer up to its first stop string or token, that token included."""
        sampling = generation.sampling
        token_list: Sequence[int] = ids.tolist()
        text = GrowingText(self.tokenizer, sampling)
        for count, id in enumerate(token_list, 1):
            text.add((id,))
            if count >= sampling.min_tokens and id in sampling.stop_token_ids:
                generation.stop_reason = id
                return ids[:count], "stop"
            if text.stopped is not None:
                generation.stop_reason = text.stopped
                return ids[:count], "stop"
        return ids, ending
