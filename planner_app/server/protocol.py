"""Bodies of requests, with OpenAI's and vLLM's fields. Unknown fields are ignored, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_INT64 = 2**63 - 1
MOST_CHOICES = 128
MOST_STOPS = 64
MOST_MESSAGES = 10_000
TokenId = Annotated[int, Field(ge=0, le=_INT64)]
Text = Annotated[str, Field(max_length=1 << 26)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    """Options of a stream: what it reports beside the text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Generating(Body):
    """Fields that completion and chat requests have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = 1
    seed: Annotated[int, Field(ge=-_INT64 - 1, le=_INT64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=_INT64)] = 0
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Generating:
        if self.stream_options is not None and not self.stream:
            raise ValueError("Stream options can only be defined when `stream=True`.")
        if self.stop == "" or (isinstance(self.stop, list) and "" in self.stop):
            raise ValueError("stop cannot contain an empty string.")
        return self


class CompletionRequest(Generating):
    """Body of `/v1/completions`."""

    prompt: Text | list[TokenId] | list[list[TokenId]] | list[Text]
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[dict[str, Any]] | None = None


class ChatRequest(Generating):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = 0
    add_generation_prompt: bool = True


class TokenizeRequest(Body):
    """Body of `/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either `prompt` or `messages`")
        return self


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
