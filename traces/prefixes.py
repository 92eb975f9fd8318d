"""Common beginnings of prompts: a tree of prompts, exact to the token, in a few operations per span.

The tree is kept as chains. A chain is one continuation of what lies before it; a prompt that departs from
it starts a new one, and a prompt that goes on past its end makes it longer. So a token's place in the tree,
and with it everything before that token, is told by `(chain, position in the prompt)`, and names never
change as the tree grows:

    prompt A   [chain 0 ------------------------]
    prompt B   [chain 0 --------][chain 1 --------]      shares A's beginning
    prompt C   [chain 0 --------][chain 1 ---][chain 2]  shares B's
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pagecast.sim.core.identity.content import own_output, own_prompt
from pagecast.traces.arrays import Ints
from pagecast.traces.schema import Trace

SCOPE = ("model", "adapter", "tokenizer", "positional", "salt")
_FIRST_PRIVATE = own_prompt(0)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where every prompt lies in the tree, piece by piece, in order of requests.

    `row`, `chain`, `begin`, `end`: a piece of request `row` from token `begin` to before `end` lies on
    `chain`. `matched` has for each request the tokens it shares with an earlier one (all of them if it
    is one's beginning). `chains` is the number of chains, `tokens` how many the tree holds.
    """

    row: Ints
    chain: Ints
    begin: Ints
    end: Ints
    matched: Ints
    chains: int
    tokens: int


def paths(trace: Trace, *, with_outputs: bool = False) -> Paths:
    """Puts the prompts in a tree, one after the other; requests of different scopes share nothing.

    With `with_outputs`, what a request generates (its last token left out, which is never computed) is
    put there as well where the trace names it, so that later prompts find it.
    """
    tree: _Tree = _TokenTree() if trace.token_ids is not None else _Tree()
    prompts = _Prompts(trace, with_outputs)
    roots: dict[tuple[object, ...], int] = {}
    pieces: list[tuple[int, int, int, int]] = []
    matched = np.zeros(len(trace), dtype=np.int64)
    for row, (tokens, scope) in enumerate(zip(prompts.tokens, _scopes(trace), strict=True)):
        prompt = prompts.prompt(row)
        if prompt is None:
            pieces.append((row, tree.new_chain(), 0, tokens))
            tree.tokens += tokens
            continue
        if scope not in roots:
            roots[scope] = tree.new_chain()
        path, match = tree.insert(roots[scope], prompt)
        matched[row] = min(match, tokens)
        pieces += [(row, chain, begin, min(end, tokens)) for chain, begin, end in path if begin < tokens]
    flat = np.array(pieces, dtype=np.int64).reshape(-1, 4)
    row_, chain_, begin_, end_ = (np.ascontiguousarray(flat[:, i]) for i in range(4))
    return Paths(row_, chain_, begin_, end_, matched, tree.chains, tree.tokens)


def _scopes(trace: Trace) -> list[tuple[object, ...]]:
    """The scope of each request, as a tuple: equal tuples may share. Missing values are one scope."""
    names = [name for name in SCOPE if name in trace.requests]
    if not names:
        return [()] * len(trace)
    codes = [pd.factorize(trace.requests[name])[0].tolist() for name in names]
    return list(zip(*codes, strict=True))


class _Prompts:
    """Each request's prompt as the tree takes it: spans, or token ids; None if it is shared by nobody."""

    def __init__(self, trace: Trace, with_outputs: bool) -> None:
        self._trace = trace
        self.tokens: list[int] = trace.integers("input_tokens").tolist()
        spans = trace.spans
        empty = np.empty(0, dtype=np.int64)
        self._start: list[int] = [] if spans is None else spans.start.tolist()
        columns = (empty,) * 3 if spans is None else (spans.content, spans.offset, spans.length)
        self._spans = list(zip(*(column.tolist() for column in columns), strict=True))
        content = columns[0]
        self._private: set[int] = set(np.unique(content[content < 0]).tolist())
        self._outputs = trace.integers("output_tokens").tolist() if with_outputs else None
        self._answers = trace.integers("output_content").tolist()
        self._answer_offsets = trace.integers("output_offset").tolist()

    def prompt(self, row: int) -> Any:
        """The prompt, followed by the answer if it is wanted and later prompts can name it."""
        if self._trace.token_ids is not None:
            return self._trace.token_ids[row]
        spans = self._spans[self._start[row] : self._start[row + 1]] if self._start else []
        if not spans and own_prompt(row) in self._private:
            spans = [(own_prompt(row), 0, self.tokens[row])]
        if self._outputs is not None and (answer := self._answer(row)):
            spans = [*(spans or [(own_prompt(row), 0, self.tokens[row])]), answer]
        return spans or None

    def _answer(self, row: int) -> tuple[int, int, int] | None:
        content, length = self._answers[row], self._outputs[row] - 1 if self._outputs else 0
        if content < 0:
            content = own_output(row)
            if content not in self._private:
                return None
        return (content, self._answer_offsets[row], length) if length > 0 else None


class _Tree:
    """Chains as lists of segments: `(content, shift)` says that token p of a prompt is offset p + shift."""

    def __init__(self) -> None:
        self.chains = 0
        self.tokens = 0
        self._ends: dict[int, list[int]] = {}
        self._keys: dict[int, list[tuple[int, int]]] = {}
        self._branches: dict[tuple[int, ...], int] = {}

    def new_chain(self) -> int:
        """The number of a chain that nothing lies on yet."""
        self.chains += 1
        return self.chains - 1

    def insert(self, root: int, prompt: Any) -> tuple[list[tuple[int, int, int]], int]:
        """The path of a prompt as `(chain, begin, end)`, and how many of its tokens were there before."""
        path: list[tuple[int, int, int]] = []
        chain, position, entered, match = root, 0, 0, -1
        for content, offset, length in prompt:
            key, stop = (content, offset - position), position + length
            while position < stop:
                ends, keys = self._ends.setdefault(chain, []), self._keys.setdefault(chain, [])
                at = bisect_right(ends, position)
                if at < len(ends) and keys[at] == key:
                    position = min(stop, ends[at])
                    continue
                # The chain does not go on like this: take a branch, or make one, or make the chain longer.
                branch = (chain, position, *key)
                node = self._branches.get(branch)
                match = position if node is None and match < 0 else match
                if node is not None or at < len(ends) or _is_unique(content):
                    if position > entered:
                        path.append((chain, entered, position))
                    entered = position
                    if node is not None:
                        chain = node
                        continue
                    chain = self._branches[branch] = self.new_chain()
                    ends, keys = self._ends.setdefault(chain, []), self._keys.setdefault(chain, [])
                ends.append(stop)
                keys.append(key)
                self.tokens += stop - position
                position = stop
        path.append((chain, entered, position))
        return path, position if match < 0 else match


def _is_unique(content: int) -> bool:
    # A prompt's own text that ends it must not lengthen a chain: the next turn would have to leave it.
    return content < 0 and not (content - _FIRST_PRIVATE) & 1


class _TokenTree(_Tree):
    """The same with token ids: a chain is an array of them, from where it begins."""

    def __init__(self) -> None:
        super().__init__()
        self._begin: dict[int, int] = {}
        self._ids: dict[int, Ints] = {}

    def insert(self, root: int, prompt: Any) -> tuple[list[tuple[int, int, int]], int]:
        """The path of a prompt as `(chain, begin, end)`, and how many of its tokens were there before."""
        path: list[tuple[int, int, int]] = []
        chain, position = root, 0
        while True:
            begin = self._begin.setdefault(chain, position)
            ids = self._ids.get(chain, np.empty(0, dtype=np.int64))[position - begin :]
            both = min(len(ids), len(prompt) - position)
            differ = np.flatnonzero(ids[:both] != prompt[position : position + both])
            end = position + (int(differ[0]) if len(differ) else both)
            if end > position:
                path.append((chain, position, end))
            position = end
            if position == len(prompt):
                return path, position
            node = self._branches.get((chain, position, int(prompt[position])))
            if node is None:
                break
            chain = node
        return self._grow(path, chain, position, prompt), position

    def _grow(
        self, path: list[tuple[int, int, int]], chain: int, position: int, prompt: Ints
    ) -> list[tuple[int, int, int]]:
        """Puts the rest of a prompt on a new chain that leaves `chain` at `position`."""
        new = self._branches[(chain, position, int(prompt[position]))] = self.new_chain()
        self._begin[new] = position
        self._ids[new] = prompt[position:]
        self.tokens += len(prompt) - position
        return [*path, (new, position, len(prompt))]
