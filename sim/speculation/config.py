"""Speculative decoding as it is asked for, in the names of vLLM's `--speculative-config`."""

from __future__ import annotations

import json
from typing import Any, Literal

from pagecast.sim.core.errors import BadInput
from pagecast.sim.documents import field_problem
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Method = Literal["ngram", "ngram_gpu", "draft_model", "eagle", "eagle3", "mtp"]
WITH_HIDDEN_STATES = ("eagle", "eagle3", "mtp")
PLANS_AHEAD = (*WITH_HIDDEN_STATES, "ngram_gpu")  # by default, and `draft_model` where it is asked for
MOST_TOKENS = 64
# Mean tokens per step, with the one that needs no draft, by number of draft tokens, of drafters in use.
# Source: InferenceX, `golden_al_distribution` (SPEED-Bench coding at temperature 1).
_PUBLISHED: dict[str, dict[int, float]] = {
    "glm-5.2-mtp": {3: 2.99},
    "deepseek-v4-pro-dspark": dict(enumerate((1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47), 1)),
}


class SpeculativeConfig(BaseModel):
    """How requests speculate. Fields with vLLM's names mean what they mean there.

    How many draft tokens are accepted is said by one of `acceptance`, `synthetic_acceptance_rates` and
    `synthetic_acceptance_length`, or per step by the trace's column `accepted_drafts`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Method = Field(description="who drafts: a draft model, n-grams of the text, EAGLE or MTP heads")
    num_speculative_tokens: int = Field(ge=1, le=MOST_TOKENS, description="draft tokens per request and step")
    acceptance: float | str | None = Field(
        None,
        description="chance that a draft token is accepted if those before it are, or a published table",
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = Field(
        None, description="chance, for each position, that this draft token and all before it are accepted"
    )
    synthetic_acceptance_length: float | None = Field(
        None, description="mean tokens that a step yields, with the one that needs no draft token"
    )
    prompt_lookup_min: int | None = Field(
        None, ge=1, description="shortest n-gram looked up; how often one is found is `match_rate`"
    )
    prompt_lookup_max: int | None = Field(None, ge=1, description="longest n-gram looked up")
    match_rate: float = Field(1.0, ge=0, le=1, description="share of steps in which an n-gram is found")
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = Field(
        None, description="draft tokens by the requests of a step, as (first, last, number)"
    )
    parallel_drafting: bool = Field(False, description="all draft tokens of a request come from one pass")
    model: str | None = Field(None, description="draft model, a known one or a folder with config.json")
    draft_cost: float | None = Field(
        None, ge=0, description="time of a drafting pass, as a share of a decode step's device time"
    )

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Reads `METHOD:DRAFTS:ACCEPTANCE`, or the JSON that vLLM takes. Errors: ValueError."""
        if text.lstrip().startswith("{"):
            return cls.read(json.loads(text))
        method, _, rest = text.partition(":")
        drafts, _, acceptance = rest.partition(":")
        if not drafts:
            raise ValueError("write METHOD:DRAFTS:ACCEPTANCE, as eagle:3:0.7, or an object of fields as JSON")
        fields: dict[str, Any] = {"method": method, "num_speculative_tokens": _number(drafts)}
        if acceptance:
            fields["acceptance"] = _number(acceptance)
        return cls.read(fields)

    @classmethod
    def read(cls, fields: Any) -> SpeculativeConfig:
        """Checks fields from outside. Errors: ValueError naming the field and what it may be."""
        if not isinstance(fields, dict):
            raise ValueError(f"it is {fields!r}; it must be an object of fields")
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ValueError(field_problem(error, cls)) from None

    @classmethod
    def make(cls, fields: Any, where: str = "speculative_config") -> SpeculativeConfig:
        """Checks fields from outside. Errors: BadInput naming the field and what it may be."""
        try:
            return cls.read(fields)
        except ValueError as error:
            raise BadInput(f"{where}: {error}") from None

    @model_validator(mode="after")
    def _check(self) -> SpeculativeConfig:
        ways = ("acceptance", "synthetic_acceptance_rates", "synthetic_acceptance_length")
        methods = [name for name in ways if getattr(self, name) is not None]
        if len(methods) > 1:
            raise ValueError(f"{methods[0]} and {methods[1]} both give the acceptance; leave one out")
        self.rates()
        self.drafts(1)
        return self

    def rates(self) -> tuple[float, ...]:
        """For each position the chance that this draft token and all before it are accepted.

        Errors: ValueError where what is given is no such chance.
        """
        count = self.num_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            return _checked(self.synthetic_acceptance_rates, count)
        if self.synthetic_acceptance_length is not None:
            return _of_length(self.synthetic_acceptance_length, count)
        if isinstance(self.acceptance, str):
            return _published(self.acceptance, count)
        chance = 0.0 if self.acceptance is None else self.acceptance
        if not 0 <= chance <= 1:
            raise ValueError(f"acceptance is {chance:g}; it must be from 0 to 1, or a published table's name")
        return tuple(chance**position for position in range(1, count + 1))

    def drafts(self, requests: int) -> int:
        """How many draft tokens each request gets in a step of `requests` requests.

        Sizes between two ranges, and beyond the last, keep the number before them, as in vLLM.
        Errors: ValueError where the ranges do not start at 1, or overlap.
        """
        ranges = self.num_speculative_tokens_per_batch_size
        if ranges is None:
            return self.num_speculative_tokens
        last = 0
        drafts = self.num_speculative_tokens
        for first, end, number in sorted(ranges):
            if not last < first <= end or number < 0 or (last == 0 and first != 1):
                raise ValueError(
                    "num_speculative_tokens_per_batch_size must be ranges (first, last, number) from 1 on "
                    "that do not overlap"
                )
            last = end
            if first <= requests:
                drafts = min(number, self.num_speculative_tokens)
        return drafts

    @property
    def has_acceptance(self) -> bool:
        """Whether a field gives the acceptance; without one, every draft token is rejected."""
        ways = (self.acceptance, self.synthetic_acceptance_rates, self.synthetic_acceptance_length)
        return any(way is not None for way in ways)

    # ---- what the scheduler needs to know

    @property
    def lookahead(self) -> int:
        """Tokens beyond those computed that a request gets blocks for: the drafter's own KV."""
        drafts_with_kv = self.method in WITH_HIDDEN_STATES or self.method == "draft_model"
        return self.num_speculative_tokens if drafts_with_kv else 0

    @property
    def recomputes_block(self) -> bool:
        """Whether the last block of a cached prefix is computed again for its hidden states."""
        return self.method in WITH_HIDDEN_STATES

    @property
    def reserved(self) -> int:
        """Tokens of the budget kept free for each of `max_num_seqs` requests, for drafting."""
        slots = self.num_speculative_tokens - 1 if self.parallel_drafting else 0
        return slots + (self.method == "draft_model")

    @property
    def padding(self) -> int:
        """Draft tokens of a full row; 0 where their number depends on the batch."""
        return 0 if self.num_speculative_tokens_per_batch_size else self.num_speculative_tokens

    @property
    def plans_ahead(self) -> bool:
        """Whether vLLM schedules asynchronously with it unless told otherwise."""
        return self.method in PLANS_AHEAD

    @property
    def may_plan_ahead(self) -> bool:
        """Whether vLLM can schedule asynchronously with it."""
        return self.method != "ngram"


def _number(text: str) -> float | int | str:
    """A text as the number that it is, if it is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _checked(rates: tuple[float, ...], count: int) -> tuple[float, ...]:
    if len(rates) != count:
        raise ValueError(f"synthetic_acceptance_rates has {len(rates)} entries for {count} draft tokens")
    if not all(0 <= rate <= 1 for rate in rates) or list(rates) != sorted(rates, reverse=True):
        raise ValueError("synthetic_acceptance_rates must be from 0 to 1, none above the one before")
    return rates


def _of_length(length: float, count: int) -> tuple[float, ...]:
    """vLLM's rates of a mean length: those with the least variance."""
    if not 1 <= length <= count + 1:
        raise ValueError(f"synthetic_acceptance_length is {length:g}; it must be from 1 to {count + 1}")
    accepted = length - 1
    return tuple(min(max(accepted - position, 0.0), 1.0) for position in range(count))


def _published(name: str, count: int) -> tuple[float, ...]:
    """Rates that give a published mean length, with one chance for every position."""
    lengths = _PUBLISHED.get(name)
    if lengths is None:
        raise ValueError(
            f"acceptance {name!r} is not known; tables are {', '.join(_PUBLISHED)}, or give a number"
        )
    if count not in lengths:
        lengths_text = ", ".join(map(str, lengths))
        raise ValueError(
            f"acceptance {name!r} was measured with {lengths_text} draft tokens, not with {count}"
        )
    chance = chance_of_length(lengths[count], count)
    return tuple(chance**position for position in range(1, count + 1))


def chance_of_length(length: float, count: int) -> float:
    """The chance of each of `count` draft tokens with which a step yields `length` tokens in the mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**position for position in range(count + 1)) < length:
            low = middle
        else:
            high = middle
    return (low + high) / 2
