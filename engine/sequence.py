"""One text in the making: a request of the scheduler, its token ids and how they are chosen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from pagecast.engine.params import SamplingParams
from pagecast.sim.core.request import Request

Listener = Callable[["Sequence", int], None]
"""Is told each token as it comes: (sequence, token id). What it raises ends this sequence alone."""

NO_ROW = -1
_NO_DRAFTS = np.empty(0, np.int32)


class Sequence:
    """The engine's side of a request. `ids[:length]` are its tokens so far, the prompt first. It ends after
    `max_output` tokens.

    `forced`: token ids to generate whatever is sampled (int32, one for each output token). `row`: where its
    block table lies on the device while it runs; `blocks_sent` of its blocks are there.

    Where requests speculate, its next step verifies the first of `draft_tokens`, as many as the plan says.
    `drafts` and `accepted` record how many were made after each step that yielded tokens, and how many were
    accepted in each step that verified some.
    """

    __slots__ = (
        "accepted",
        "blocks_sent",
        "done",
        "draft_tokens",
        "drafts",
        "finish_reason",
        "forced",
        "ids",
        "keyed",
        "length",
        "listener",
        "max_output",
        "params",
        "preemptions",
        "reason",
        "request",
        "row",
        "seed",
        "stops",
    )

    def __init__(
        self,
        request: Request,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int = 0,
        stops: frozenset[int] = frozenset(),
        forced: NDArray[np.int32] | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.request = request
        self.params = params
        self.seed = seed
        self.stops = stops
        self.forced = forced
        self.listener = listener
        self.ids = prompt
        self.max_output = request.output_tokens
        self.length = len(prompt)
        self.keyed = len(prompt)  # tokens that the request's block keys know
        self.row = NO_ROW
        self.blocks_sent = 0
        self.preemptions = 0  # of the request, as far as its row knows
        self.done = False
        self.draft_tokens = _NO_DRAFTS
        self.drafts: list[int] = []
        self.accepted: list[int] = []
        self.finish_reason = ""  # "stop", "length", "cancelled", "failed" or "rejected"
        self.reason = ""

    def make_room(self) -> None:
        """Makes room in `ids` for the output; called once the request was accepted."""
        prompt = self.ids
        self.ids = np.empty(len(prompt) + self.max_output, np.int32)
        self.ids[: len(prompt)] = prompt

    def verify(self, drawn: list[int]) -> tuple[list[int], int]:
        """Compares its draft tokens with those drawn at their places; `drawn` has one token more.

        Returns the tokens that the step yields, up to the first that replaces a rejected one and not beyond
        the end of the text; and how many draft tokens are among them. A draft token is accepted where it is
        the token that would have been drawn without it: texts are those of an engine that does not
        speculate, at any temperature.
        """
        drafts = len(drawn) - 1
        accepted = 0
        while accepted < drafts and drawn[accepted] == self.draft_tokens[accepted]:
            accepted += 1
        if drafts:
            self.accepted.append(accepted)
        yielded = drawn[: min(accepted + 1, len(self.ids) - self.length)]
        for number, token in enumerate(yielded):
            if token in self.stops:
                del yielded[number + 1 :]
                break
        return yielded, len(yielded) - 1

    def append(self, token: int, block_size: int) -> None:
        """Takes note of a generated token; a block it completes gets its key."""
        self.ids[self.length] = token
        self.length += 1
        if self.length % block_size == 0 and self.request.keys.explicit:
            self.request.keys.extend(self.ids[self.keyed : self.length].astype(np.int64))
            self.keyed = self.length

    @property
    def output(self) -> NDArray[np.int32]:
        """The token ids generated so far."""
        return self.ids[self.request.prompt_tokens : self.length]
