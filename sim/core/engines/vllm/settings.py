"""vLLM's settings beside `Limits`, in the names of its server arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagecast.sim.core.engines.version_order import since
from pagecast.sim.core.errors import BadInput
from pagecast.sim.core.option import chunked_prefill_option, option

_SINCE = {
    "max_num_queued_reqs": "0.30",
    "max_num_queued_tokens": "0.31",
    "long_prefill_token_threshold_adaptive": "0.31",
}


@dataclass(frozen=True)
class VllmSettings:
    """Settings of vLLM's rules; with the defaults nothing is decided otherwise.

    Source: vllm/config/scheduler.py, `SchedulerConfig`.
    """

    chunked_prefill: bool = chunked_prefill_option(True)
    long_prefill_token_threshold: int = option(
        "vllm: most tokens of a prompt in a step, of a lone request's too before 0.31; 0: any number", 0, ge=0
    )
    long_prefill_token_threshold_adaptive: bool = option(
        "vllm: that threshold is at least an equal share of the step for each request", False
    )
    max_num_scheduled_tokens: int | None = option(
        "vllm: most tokens that are planned for a step (default: max_num_batched_tokens)", None, ge=1
    )
    watermark: float = option(
        "vllm: fraction of all blocks that an admission leaves free while others run", 0.0, ge=0, le=0.999
    )
    scheduler_reserve_full_isl: bool = option(
        "vllm: admit a request only where its whole prompt fits, not just its first chunk", True
    )
    prefill_schedule_interval: int = option(
        "vllm: prompts in one of so many steps only (without data parallelism since 0.33)", 1, ge=1
    )
    max_num_queued_reqs: int | None = option(
        "vllm: requests are rejected beyond so many, waiting or running", None, ge=0
    )
    max_num_queued_tokens: int | None = option(
        "vllm: requests are rejected while prompts without a first token have so many tokens", None, ge=0
    )

    decode_context_parallel_size: int = option(
        "vllm: GPUs among those of tensor_parallel_size that share a sequence's tokens: a block holds "
        "block_size tokens on each",
        1,
        ge=1,
    )
    encoder_tokens: int | None = option(
        "vllm: tokens of images that a step encodes and the encoder's cache holds "
        "(default: max_num_batched_tokens, or the trace's longest image)",
        None,
        ge=1,
    )

    @property
    def decodes_apart(self) -> bool:
        """Decodes take tokens of the step."""
        return False

    def check(self) -> None:
        """Errors: BadInput naming the first setting that cannot work."""
        if not 0 <= self.watermark < 1:
            raise BadInput(f"watermark is {self.watermark}; it must be at least 0 and below 1")
        for name in ("max_num_scheduled_tokens", "prefill_schedule_interval", "encoder_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} is {value}; it must be at least 1")
        if self.long_prefill_token_threshold < 0:
            raise BadInput("long_prefill_token_threshold must be at least 0")

    def with_items(self, step_tokens: int, longest: int) -> VllmSettings:
        """The settings for images of at most `longest` tokens. Errors: BadInput where none of these fits.

        vLLM takes the longest image that the model may have, which is more than a trace tells.
        """
        tokens = self.encoder_tokens
        if tokens is not None and tokens < longest:
            raise BadInput(
                f"encoder_tokens is {tokens}, and the trace's longest image has {longest} tokens; raise it"
            )
        return replace(self, encoder_tokens=max(step_tokens, longest) if tokens is None else tokens)

    def check_version(self, version: str) -> None:
        """Errors: BadInput naming a setting that this version of vLLM does not have."""
        for name, first in _SINCE.items():
            if getattr(self, name) not in (None, False) and not since(version, first):
                raise BadInput(f"vLLM {version} has no {name}; choose vllm@{first} or later, or leave it out")
