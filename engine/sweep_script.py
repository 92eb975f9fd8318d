"""Writer of traces whose requests come one group after another, each when the one before has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pagecast.traces.schema import Spans, Trace, table

PromptSpans = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A text of `tokens` tokens that prompts may begin with."""

    content: int
    tokens: int

    def cut(self, tokens: int) -> PromptSpans:
        """Its first `tokens` tokens, as many as there are."""
        return ((self.content, 0, max(1, min(tokens, self.tokens))),)


class Script:
    """A trace in the making. Lengths are kept within `max_len` tokens of prompt and output together.

    Each request follows the one that `follow` named last, or comes at the start. `random` draws whatever
    the trace leaves to chance: equal names give equal traces.
    """

    def __init__(self, name: str, max_len: int, seed: int = 0) -> None:
        self.name = name
        self.max_len = max_len
        self.random = np.random.default_rng([seed, *name.encode()])
        self._texts = 0
        self._after = -1
        self._rows: list[tuple[int, int, int, float]] = []  # prompt, output, after, gap
        self._prompts: list[PromptSpans] = []
        self._quotes: dict[int, tuple[int, int]] = {}  # content and offset that an output is, by row

    def __len__(self) -> int:
        return len(self._rows)

    def document(self, tokens: float) -> Document:
        """A text that no other prompt has."""
        self._texts += 1
        return Document(self._texts, max(1, int(tokens)))

    def add(
        self,
        prompt: PromptSpans,
        output: int,
        *,
        gap_s: float = 0.0,
        after: int | None = None,
        quote: tuple[int, int] | None = None,
    ) -> int:
        """Adds a request, `gap_s` after the end of the one it follows; returns its number.

        A prompt too long for its output loses its end. `quote`: content and offset that the output is;
        without it the engine draws what comes.
        """
        if quote is not None:
            self._quotes[len(self._rows)] = quote
        output = min(max(1, output), self.max_len - 1)
        room, kept = self.max_len - output, list[tuple[int, int, int]]()
        for content, offset, length in prompt:
            if room > 0:
                kept.append((content, offset, min(length, room)))
                room -= kept[-1][2]
        self._prompts.append(tuple(kept))
        length = sum(span[2] for span in kept)
        self._rows.append((length, output, self._after if after is None else after, gap_s))
        return len(self._rows) - 1

    def fresh(self, tokens: int, output: int, *, gap_s: float = 0.0) -> int:
        """Adds a request whose prompt is all new."""
        return self.add(self.document(tokens).cut(tokens), output, gap_s=gap_s)

    def follow(self, row: int) -> None:
        """Requests that are added from now on come when request `row` has ended."""
        self._after = row

    def group(self, prompts: Sequence[PromptSpans], output: int, *, gap_s: float = 0.0) -> int:
        """Adds requests that come together, and lets the next follow the last of them."""
        rows = [self.add(prompt, output, gap_s=gap_s) for prompt in prompts]
        self.follow(rows[-1])
        return rows[-1]

    def trace(self) -> Trace:
        """All of it."""
        lengths, outputs, after, gaps = (np.array(column) for column in zip(*self._rows, strict=True))
        columns = {
            "arrival_s": np.where(after < 0, 0.0, np.nan),
            "input_tokens": lengths,
            "output_tokens": outputs,
            "after": after,
            "gap_s": gaps,
        }
        if self._quotes:
            quotes = [self._quotes.get(row, (-1, 0)) for row in range(len(self._rows))]
            content, offset = np.array(quotes, np.int64).T
            columns |= {"output_content": content, "output_offset": offset}
        flat = np.array([span for prompt in self._prompts for span in prompt], np.int64).reshape(-1, 3)
        start = np.concatenate([[0], np.cumsum([len(prompt) for prompt in self._prompts])]).astype(np.int64)
        return Trace(
            self.name, table(columns), Spans(start, flat[:, 0].copy(), flat[:, 1].copy(), flat[:, 2].copy())
        )
