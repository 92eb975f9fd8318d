"""Bodies of requests, with OpenAI's and vLLM's fields. Unknown fields are ignored, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

_INT64 = 2**63 - 1
MOST_CHOICES = 128
MOST_STOPS = 64
MOST_MESSAGES = 4096  # whose check takes half of a tenth of a second
MOST_TOOLS = 1024
TokenId = Annotated[int, Field(ge=0, le=_INT64)]
Text = Annotated[str, Field(max_length=1 << 26)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


_KINDS = {str: "texts", int: "ids", list: "lists", dict: "parts"}
TAGS = frozenset({"text", *_KINDS.values()})
"""Parts of an error's place that name a type, not a field."""


def _one_of(message: str, *, empty: str) -> Discriminator:
    """Tells the types of a field apart, so that an error names only what is wrong with the type it has.

    `empty`: the tag of an empty list. `message` is the error where a value has none of the types.
    """

    def tag(value: Any) -> str | None:
        if isinstance(value, str):
            return "text"
        if not isinstance(value, list):
            return None
        return _KINDS.get(type(value[0])) if value else empty

    return Discriminator(tag, custom_error_type="wrong_type", custom_error_message=message)


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[TokenId], Tag("ids")]
    | Annotated[list[list[TokenId]], Tag("lists")]
    | Annotated[list[Text], Tag("texts")],
    _one_of("give a text, a list of texts, a list of token ids, or a list of such lists", empty="ids"),
]
Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[dict[str, Any]], Tag("parts")],
    _one_of("give a text, or a list of parts", empty="parts"),
]
Stops = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Text], Tag("texts"), Field(max_length=MOST_STOPS)],
    _one_of("give a text, or a list of texts", empty="texts"),
]


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
    stop: Stops | None = None
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
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
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

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool = True


class ChatMessage(Body):
    """A turn of a conversation."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(Generating):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = 0
    add_generation_prompt: bool = True
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("when using `top_logprobs`, `logprobs` must be set to true.")
        return self


class TokenizeRequest(Body):
    """Body of `/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    add_generation_prompt: bool = True
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = None
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


class AdapterRequest(Body):
    """Body of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(max_length=4096)] = ""
