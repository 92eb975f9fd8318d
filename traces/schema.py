"""The one form every trace takes: a table of requests, and the spans their prompts are made of.

Readers and generators make a `Trace`; `replay`, `hits` and the engine take one. Requests are rows of a
pandas table in file order; prompts lie beside it as three flat arrays (compressed rows), because a
million requests of Python lists would not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd


@dataclass(frozen=True)
class Spans:
    """Prompts as spans: row i is `content[start[i]:start[i + 1]]` and so on; none at all: a unique prompt.

    `content` (int64) names a text, `offset` and `length` (int64, tokens) cut a piece out of it.
    The pieces of a prompt, in order, have `input_tokens` tokens together.
    """

    start: npt.NDArray[np.int64]
    content: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """The spans of one request as `(content, offset, length)`; empty for a unique prompt."""
        a, b = int(self.start[index]), int(self.start[index + 1])
        return list(
            zip(self.content[a:b].tolist(), self.offset[a:b].tolist(), self.length[a:b].tolist(), strict=True)
        )


COLUMNS: dict[str, str] = {
    # name: meaning (dtype). Only the first three are required; the rest have the default given.
    "arrival_s": "seconds from the trace's start; NaN where `after` gives it (float64)",
    "input_tokens": "prompt length, at least 1 (int64)",
    "output_tokens": "tokens generated, at least 1 (int64)",
    "priority": "lower is more urgent (int64, 0)",
    "session": "conversation the request belongs to (string, missing)",
    "after": "row number of the request this one follows, -1 for none (int64, -1)",
    "gap_s": "think time: seconds from the end of `after` to this arrival (float64, 0)",
    "cancel_after_s": "seconds after arrival at which the client gives up, NaN for never (float64, NaN)",
    "model": "model revision asked for: part of the scope (string, missing)",
    "adapter": "LoRA adapter: part of the scope (string, missing)",
    "salt": "tenant's cache salt: part of the scope (string, missing)",
    "output_content": "text that the generated tokens are, so that later prompts may quote it; "
    "-1 for one of their own (int64, -1)",
    "output_offset": "where in that text they begin (int64, 0)",
}
REQUIRED = ("arrival_s", "input_tokens", "output_tokens")


@dataclass(frozen=True)
class Trace:
    """Requests in arrival order, ready to be replayed.

    `requests` holds the columns of `COLUMNS` (optional ones may be absent), `spans` the prompts (or
    None: every prompt is unique), `token_ids` the prompts as token ids where a trace has them, one
    array a row (then `spans` is None). `notes` are sentences a reader wants the user to see.
    """

    name: str
    requests: pd.DataFrame
    spans: Spans | None = None
    token_ids: list[npt.NDArray[np.int64]] | None = None
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.requests)
