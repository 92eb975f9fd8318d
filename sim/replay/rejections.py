"""Reasons of rejections: what kind each is, and whether the load has a part in it."""

from __future__ import annotations

import re

from pagecast.sim.core.engines.sglang.mix import NEVER_ADMITTED, NEVER_AGAIN
from pagecast.sim.core.request import Request, State

_AT_ANY_LOAD = re.compile(
    r"\d+ prompt \+ \d+ (output tokens|max_tokens) exceed |needs \d+ blocks of \d+ tokens; |"
    + re.escape(NEVER_ADMITTED)
)

# The kinds of reasons for which a replica rejects requests, N for a number of the scenario.
KINDS = (
    "prompt + output tokens exceed max_model_len N",
    "prompt + max_tokens exceed max_model_len N",
    "prompt + output tokens exceed max_num_batched_tokens N, and prompts are not cut",
    "needs more than the pool's N blocks of N tokens",
    "needs more than its tenant's N blocks of N tokens",
    "predicted TTFT is above N s",
    NEVER_ADMITTED,
    NEVER_AGAIN,
)
_KIND = re.compile("|".join(re.escape(name).replace("N", r"[0-9.e+-]+") for name in KINDS))


def at_any_load(reason: str) -> bool:
    """Whether a request was rejected for its length alone: by the model, a step, the pool or a ceiling.

    Others are rejected for the load (`--shed-ttft-s`), or because a fleet has lost their replica.
    """
    return _AT_ANY_LOAD.match(reason) is not None


def is_for_load(request: Request) -> bool:
    """Whether a request was rejected, and the same request might be served at another time."""
    return request.state is State.REJECTED and not at_any_load(request.reason)


def is_kind(text: str) -> bool:
    """Whether a replica may reject a request for a reason of this kind (see `kind`)."""
    return _KIND.fullmatch(text) is not None


def kind(reason: str) -> str:
    """A rejection's reason without the numbers of the one request, so that equal ones can be counted."""
    reason = re.sub(r"^\d+ prompt \+ \d+ (output|max_tokens)", r"prompt + \1", reason)
    reason = re.sub(r"^predicted TTFT \S+ s", "predicted TTFT", reason)
    reason = re.sub(
        r"^needs \d+ blocks of (\d+) tokens; the pool has (\d+)$",
        r"needs more than the pool's \2 blocks of \1 tokens",
        reason,
    )
    return re.sub(
        r"^needs \d+ blocks of (\d+) tokens; its tenant may hold (\d+)$",
        r"needs more than its tenant's \2 blocks of \1 tokens",
        reason,
    )
