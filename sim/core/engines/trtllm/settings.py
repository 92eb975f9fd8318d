"""TensorRT-LLM's settings that its scheduling rules take besides `Limits`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import chunked_prefill_option, option

Chunking = Literal["first_come_first_served", "equal_progress"]
CHUNKING: tuple[Chunking, ...] = get_args(Chunking)


@dataclass(frozen=True)
class TrtllmSettings:
    """`chunked_context`: long prompts are cut into chunks, by the policy `chunking`.

    `unit`: a chunk that does not end its prompt is a multiple of so many tokens; None: of a block.
    `wait_steps`, `wait_ratio`: while requests generate, prompts are held back so that more of them share a
    step, for at most so many steps, and until that part of a step's tokens is used.
    """

    chunked_context: bool = chunked_prefill_option(False)
    chunking: Chunking = option(
        "trtllm: how prompts share the tokens of a step", CHUNKING[0], flat="context_chunking_policy"
    )
    unit: int | None = None
    wait_steps: int = option(
        "trtllm: most steps for which prompts wait to fill a batch", 0, flat="batch_wait_timeout_iters", ge=0
    )
    wait_ratio: float = option(
        "trtllm: part of a step's tokens at which prompts no longer wait",
        0.0,
        flat="batch_wait_max_tokens_ratio",
        ge=0,
        le=1,
    )

    @property
    def decodes_apart(self) -> bool:
        """Decodes and prompts share a step's tokens."""
        return False

    def check(self) -> None:
        """Errors: BadInput naming the first setting that cannot work."""
        if self.chunking not in CHUNKING:
            raise BadInput(
                f"context chunking policy {self.chunking!r} is not known; choose one of {', '.join(CHUNKING)}"
            )
        if self.wait_steps < 0 or not 0 <= self.wait_ratio <= 1:
            raise BadInput(
                f"batch_wait_timeout_iters is {self.wait_steps}, which must be at least 0, and "
                f"batch_wait_max_tokens_ratio {self.wait_ratio}, which must be between 0 and 1"
            )
        if self.unit is not None and self.unit < 1:
            raise BadInput(f"the chunk unit is {self.unit}; it must be at least 1")
