"""N-gram drafter: a text is taken to go on as it did where its latest tokens stood before.

The rule is that of vLLM's `NgramProposer` (prompt lookup decoding).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pagecast.engine.sequence import Sequence
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.request import Request
from pagecast.sim.speculation.config import SpeculativeConfig

Ints = NDArray[np.int32]
LOOKUP = 5  # tokens of an n-gram where nobody says how many, as in vLLM
_MEASURED = (
    "acceptance",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "match_rate",
    "draft_cost",
)
_OF_DRAFT_MODELS = ("model", "parallel_drafting")
_NONE = np.empty(0, np.int32)


def propose(tokens: Ints, shortest: int, longest: int, most: int) -> Ints:
    """Up to `most` tokens that followed the n-gram in which `tokens` [n] ends, where it stood first.

    It is the longest, of `shortest` to `longest` tokens, that stands anywhere before. Where there is
    none, nothing is drafted.
    """
    n = len(tokens)
    if most < 1 or n <= shortest:
        return _NONE
    ends = np.flatnonzero(tokens[: n - 1] == tokens[-1])  # last tokens of earlier n-grams
    length = 1
    while len(ends) and length < longest:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[n - 1 - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    if not len(ends) or length < shortest:
        return _NONE
    start = int(ends[0]) + 1
    return tokens[start : start + most].copy()


class NgramDrafter:
    """Implements the core's `Drafter`: keeps a sequence's next draft tokens in `Sequence.draft_tokens`.

    `sequences` are the live ones. No text gets longer than `max_len` by a draft token.
    """

    def __init__(
        self, config: SpeculativeConfig, sequences: Mapping[Request, Sequence], *, max_len: int
    ) -> None:
        self.config = config
        self.lookahead = config.lookahead
        self.reserved = config.reserved
        self.recomputes_block = config.recomputes_block
        self.most = config.num_speculative_tokens
        self.padding = config.padding
        self._sequences = sequences
        self._max_len = max_len
        self._shortest, self._longest = lookup_lengths(config)

    def draft(self, request: Request, requests: int) -> int:
        """Looks up what may follow the newest token of a request, in a step of so many `requests`."""
        sequence = self._sequences[request]
        most = min(self.config.drafts(requests), self._max_len - sequence.length)
        tokens = sequence.ids[: sequence.length]
        sequence.draft_tokens = propose(tokens, self._shortest, self._longest, most)
        sequence.drafts.append(len(sequence.draft_tokens))
        return len(sequence.draft_tokens)


def lookup_lengths(config: SpeculativeConfig) -> tuple[int, int]:
    """The fewest and the most tokens of an n-gram. A bound that is not given is the other one."""
    shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
    shortest = shortest or longest or LOOKUP
    return shortest, longest or shortest


def engine_speculation(text: str | None) -> SpeculativeConfig | None:
    """How an engine speculates, by its option `speculative_config`; None where it does not.

    Errors: BadInput for what the engine can't do, and where an acceptance is given: it is measured here.
    """
    if text is None:
        return None
    try:
        config = SpeculativeConfig.parse(text)
    except ValueError as error:
        raise BadInput(f"speculative_config: {error}") from None
    if config.method != "ngram":
        raise BadInput(
            f"speculative_config: the engine speculates with method ngram, not {config.method}; "
            "replay and plan know the others"
        )
    for name in _MEASURED:
        if name in config.model_fields_set:
            raise BadInput(f"speculative_config: {name} is measured by the engine; leave it out (ngram:3)")
    for name in _OF_DRAFT_MODELS:
        if name in config.model_fields_set:
            raise BadInput(f"speculative_config: {name} is for draft models; leave it out (ngram:3)")
    shortest, longest = lookup_lengths(config)
    if shortest > longest:
        raise BadInput(
            f"speculative_config: prompt_lookup_min ({shortest}) is more than prompt_lookup_max ({longest})"
        )
    return config
