"""What TensorRT-LLM's scheduler imports, without its bindings: requests, states, a policy's name, and no log.

Only scheduler.py itself is TensorRT-LLM's; it is read from a folder (`PAGECAST_TRTLLM`) that holds
tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py.
"""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

from trtllm_blocks import PrefixReuseSummary

FOLDER = "PAGECAST_TRTLLM"


class LlmRequestState(enum.Enum):
    """States of a request, in the order that the schedulers compare."""

    ENCODER_INIT = 1
    CONTEXT_INIT = 10
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    GENERATION_COMPLETE = 20


class CapacitySchedulerPolicy(enum.Enum):
    """Policies by their names."""

    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class LlmRequest:
    """A request as the schedulers see it, after cpp/include/tensorrt_llm/batch_manager/llmRequest.h."""

    num_draft_tokens = 0
    is_encoder_init_state = is_disagg_generation_init_state = False

    def __init__(self, request_id: int, tokens: list[int], max_new_tokens: int) -> None:
        self.request_id = self.py_request_id = request_id
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.max_new_tokens = max_new_tokens
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = 0
        self.estimated_reusable_tokens = 0
        self._chunk = self.prompt_len

    @property
    def state_value(self) -> int:
        return int(self.state.value)

    @property
    def is_context_init_state(self) -> bool:
        return self.state is LlmRequestState.CONTEXT_INIT

    @property
    def is_generation_in_progress_state(self) -> bool:
        return self.state in (LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE)

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_current_position == 0

    @property
    def is_last_context_chunk(self) -> bool:
        return self.context_current_position + self.context_chunk_size == self.prompt_len

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int:
        return self._chunk

    @context_chunk_size.setter
    def context_chunk_size(self, size: int) -> None:
        self._chunk = min(size, self.context_remaining_length)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def get_num_tokens(self, _beam: int) -> int:
        return len(self.tokens)

    def get_unique_tokens(self, _beam: int) -> list[int]:
        return self.tokens

    def has_draft_tokens(self) -> bool:
        return False

    def get_beam_width_by_iter(self, *, for_next_iteration: bool) -> int:
        return 1

    def set_prepopulated_prompt_len(self, tokens: int, block_size: int) -> None:
        """Moves the first chunk behind the cached prefix; one that does not end the prompt ends a block."""
        if tokens:
            chunk = self.context_chunk_size
            if tokens + chunk < self.prompt_len:
                chunk = (tokens + chunk) // block_size * block_size - tokens
            self.context_current_position = tokens
            self.context_chunk_size = chunk
        self.estimated_reusable_tokens = 0

    def move_to_next_context_chunk(self) -> None:
        self.context_current_position += self.context_chunk_size
        self.context_chunk_size = 0

    def will_complete_next_iteration(self) -> bool:
        return self.generated + 1 >= self.max_new_tokens

    def pause(self) -> None:
        """Generated tokens become prompt, and all is computed again."""
        self.max_new_tokens -= self.generated
        self.prompt_len = len(self.tokens)
        self.state = LlmRequestState.CONTEXT_INIT
        self.context_current_position = 0
        self._chunk = self.prompt_len


def _module(name: str, **content: Any) -> types.ModuleType:
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__path__ = []
    for key, value in content.items():
        setattr(module, key, value)
    return module


def load() -> types.ModuleType:
    """TensorRT-LLM's scheduler.py. Errors: KeyError where no folder is named."""
    internal = types.SimpleNamespace(
        batch_manager=types.SimpleNamespace(PrefixReuseSummary=PrefixReuseSummary, PeftCacheManager=object)
    )
    _module("strenum", StrEnum=enum.StrEnum)
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi", "tensorrt_llm._torch"):
        _module(name)
    _module("tensorrt_llm.bindings", internal=internal)
    _module("tensorrt_llm.llmapi.llm_args", CapacitySchedulerPolicy=CapacitySchedulerPolicy)
    quiet = types.SimpleNamespace(debug=_nothing, warning=_nothing, info=_nothing)
    _module("tensorrt_llm.logger", logger=quiet)
    package = "tensorrt_llm._torch.pyexecutor"
    _module(package)
    _module(
        f"{package}.llm_request",
        LlmRequest=LlmRequest,
        LlmRequestState=LlmRequestState,
        get_multimodal_encoder_token_lengths=_nothing,
        is_multimodal_encoder_ready=_nothing,
    )
    _module(f"{package}.scheduler")
    path = Path(os.environ[FOLDER]) / "tensorrt_llm/_torch/pyexecutor/scheduler/scheduler.py"
    spec = importlib.util.spec_from_file_location(f"{package}.scheduler.scheduler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _nothing(*_args: Any, **_more: Any) -> None:
    pass
