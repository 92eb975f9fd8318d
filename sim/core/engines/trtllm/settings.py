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
    """

    chunked_context: bool = chunked_prefill_option(False)
    chunking: Chunking = option(
        "trtllm: how prompts share the tokens of a step", CHUNKING[0], flat="context_chunking_policy"
    )
    unit: int | None = None

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
        if self.unit is not None and self.unit < 1:
            raise BadInput(f"the chunk unit is {self.unit}; it must be at least 1")
