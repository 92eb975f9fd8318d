"""Time of a step that verifies draft tokens, and of making the next ones.

Where every request verifies K draft tokens (EAGLE, MTP, draft models), verifying is decoding with several
query tokens: a step of n requests that compute r rows together takes what a decode step of n requests over
their context takes, and for the other r - n rows what a step of so many more requests takes longer
without any context. The weights' share grows with the rows; the KV cache is read once per request.

N-grams find more for one request than for another. Engines run such a step as one with prompts, whose chunks
are short: outside of the graphs for decode steps, with the attention of prompts (vLLM: piecewise graphs; this
engine: graphs for prompts). So it is timed as that.

Drafting is a term of its own. Its first pass covers all rows of the step, each further one a row per request;
a pass takes `share` of what the model itself takes for the same rows.
"""

from __future__ import annotations

from typing import NamedTuple

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.plan import StepPlan, counts_as_decode
from pagecast.sim.costs.batch import Batch
from pagecast.sim.costs.step_costs import StepCosts
from pagecast.sim.machine.model_facts import ModelFacts
from pagecast.sim.speculation.config import WITH_HIDDEN_STATES, SpeculativeConfig


class DraftShape(NamedTuple):
    """Shape of a step whose requests speculate.

    `requests` generate: they compute `rows` tokens together over `context` tokens, the longest has `longest`.
    `verifying` are the chunks of those that verify draft tokens, `prompts` all other chunks, as in `Batch`.
    `yielding` requests get tokens of the step.
    """

    requests: int
    rows: int
    context: int
    longest: int
    prompts: tuple[tuple[int, int], ...]
    yielding: int
    verifying: tuple[tuple[int, int], ...] = ()

    @property
    def batch(self) -> Batch:
        """The step with draft tokens that are verified as short prompts."""
        alone = self.requests - len(self.verifying)
        context = self.context - sum([there for _, there in self.verifying])
        return Batch(alone, context, self.longest if alone else 0, self.prompts + self.verifying)


def shape_of(plan: StepPlan) -> DraftShape:
    """The shape of a plan; a chunk of one token counts as a decode."""
    requests = rows = context = longest = yielding = 0
    prompts: list[tuple[int, int]] = []
    verifying: list[tuple[int, int]] = []
    for chunk in plan.chunks:
        yielding += chunk.last
        if chunk.drafts or counts_as_decode(chunk.tokens):
            requests += 1
            rows += chunk.tokens
            context += chunk.start
            longest = max(longest, chunk.start)
            if chunk.drafts:
                verifying.append((chunk.tokens, chunk.start))
        else:
            prompts.append((chunk.tokens, chunk.start))
    return DraftShape(requests, rows, context, longest, tuple(prompts), yielding, tuple(verifying))


class Lookup(NamedTuple):
    """Host time of n-grams: per request of a step, and more for a step with prompts."""

    request_ns: int = 0
    prompt_ns: int = 0


NO_LOOKUP = Lookup()


class SpeculationCosts:
    """Times by a model's `costs`.

    `share`: of a drafting pass, of what the model takes. `lookup`: what the host takes to look up draft
    tokens, while the device rests.
    """

    def __init__(
        self, costs: StepCosts, config: SpeculativeConfig, share: float, lookup: Lookup = NO_LOOKUP
    ) -> None:
        self.share = share
        self.lookup = lookup
        self._costs = costs
        self._config = config
        self._as_prompts = config.method == "ngram"

    def device_ns(self, shape: DraftShape, after: int = 0) -> int:
        """Time of a step: verifying, its prompts, and drafting. `after`: see `Batch`."""
        time = self.computing_ns(shape, after) + self.lookup.request_ns * shape.requests
        if shape.prompts:
            time += self.lookup.prompt_ns
        if self.share and shape.yielding:
            time += self.drafting_ns(shape, time)
        return time

    def computing_ns(self, shape: DraftShape, after: int = 0) -> int:
        """Time of a step without drafting."""
        if self._as_prompts and shape.verifying:
            return self._costs.device_ns(shape.batch._replace(after=after))
        n, rows, context, longest, prompts, _, _ = shape
        if prompts:
            # The rows of draft tokens go through the weights beside those of the prompts.
            drafts = ((rows - n, 0),) if rows > n else ()
            return self._costs.device_ns(Batch(n, context, longest, prompts + drafts, after))
        line = self._costs.decode_line(n)
        time = line.ns(context, longest)
        if rows > n:
            time += self._costs.decode_line(rows).ns(0, 0) - line.ns(0, 0)
        return time

    def drafting_ns(self, shape: DraftShape, computing_ns: int) -> int:
        """Time of the passes that make the next draft tokens."""
        drafts = self._config.drafts(shape.requests + len(shape.prompts))
        if not drafts:
            return 0
        further = 0 if self._config.parallel_drafting else drafts - 1
        time = computing_ns
        if further:
            time += further * self._costs.decode_line(shape.yielding).ns(shape.context, shape.longest)
        return round(self.share * time)


def drafting_share(config: SpeculativeConfig, model: ModelFacts, draft_model: ModelFacts | None) -> float:
    """Time of a drafting pass as a share of a pass of the model, by the weights that it reads.

    A head (EAGLE, MTP) is taken for one layer and the output matrix. N-grams are found on the side: nothing.
    Errors: BadInput for a draft model that nothing is said of.
    """
    if config.draft_cost is not None:
        return config.draft_cost
    if draft_model is not None:
        return draft_model.active_params / model.active_params
    if config.method in WITH_HIDDEN_STATES:
        head = model.vocab * model.hidden
        layers = model.active_params - model.embedding_params - model.head_params
        return (layers / model.layers + head) / (layers + head)
    if config.method == "draft_model":
        raise BadInput("speculation by a draft model needs `model`, or `draft_cost`: what a pass of it takes")
    return 0.0
