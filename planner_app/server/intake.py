"""Intake of requests: checks their bodies and makes generations of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import uuid4

from pagecast.planner_app.server.errors import ApiError, not_found
from pagecast.planner_app.server.generation import Bell, Generation, Outbox, Sampling
from pagecast.planner_app.server.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Generating,
    TokenizeRequest,
)
from pagecast.planner_app.server.tokenizer import Message, Tokenizer

MOST_PROMPTS = 1024  # in one request
MOST_GENERATIONS = 4096


@dataclass(slots=True)
class GenerationRequest:
    """A request as it will be answered: its generations, in the order of their `index`.

    `logprobs`: how many alternatives a client gets for each token; None: no log probabilities.
    """

    id: str
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    echo: bool
    return_token_ids: bool
    bell: Bell
    generations: list[Generation] = field(default_factory=list)


class RequestIntake:
    """Makes generations of requests, and refuses those that can't be served.

    `most_logprobs` -1: none are available. `echoes`: generations get the tokens of the last message.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        names: tuple[str, ...],
        adapters: dict[str, str],
        max_model_len: int,
        *,
        vocabulary: int | None = None,
        most_logprobs: int = 20,
        echoes: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.names = names
        self.adapters = adapters
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary
        self._most_logprobs = most_logprobs
        self._echoes = echoes
        self._numbers = count()
        self._outbox = Outbox()

    # ---- requests

    def completion(self, body: CompletionRequest, request_id: str | None) -> GenerationRequest:
        """The generations of a completion request. Errors: ApiError."""
        name, adapter = self.model(body.model)
        if body.suffix:
            raise ApiError("suffix is not currently supported", param="suffix")
        prompts = self._prompts(body)
        request = self._new_request(body, name, chat=False, id=f"cmpl-{request_id or uuid4().hex}")
        request.logprobs = body.logprobs
        request.echo = bool(body.echo)
        self._check_logprobs(request.logprobs)
        for prompt in prompts:
            self._add(request, body, prompt, body.max_tokens, adapter)
        return request

    def chat(self, body: ChatRequest, request_id: str | None) -> GenerationRequest:
        """The generations of a chat request. Errors: ApiError."""
        name, adapter = self.model(body.model)
        messages = [_message(turn, at) for at, turn in enumerate(body.messages)]
        prompt = self.tokenizer.encode(self.tokenizer.chat(messages, generate=body.add_generation_prompt))
        request = self._new_request(body, name, chat=True, id=f"chatcmpl-{request_id or uuid4().hex}")
        if body.logprobs:
            request.logprobs = body.top_logprobs or 0
        self._check_logprobs(request.logprobs)
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        echo = self.tokenizer.encode(messages[-1]["content"]) if self._echoes else None
        self._add(request, body, prompt, most, adapter, echo)
        return request

    def tokens(self, body: TokenizeRequest) -> list[int]:
        """The token ids of a prompt or conversation. Errors: ApiError."""
        self.model(body.model)
        if body.prompt is not None:
            return self.tokenizer.encode(body.prompt)
        messages = [_message(turn, at) for at, turn in enumerate(body.messages or [])]
        return self.tokenizer.encode(self.tokenizer.chat(messages, generate=body.add_generation_prompt))

    def model(self, name: str | None) -> tuple[str, str]:
        """The served name that was asked for, and its adapter ("" for none). Errors: ApiError."""
        if name is None or name == "":
            return self.names[0], ""
        if name in self.adapters:
            return name, name
        if name not in self.names:
            raise not_found(name[:200])
        return name, ""

    # ---- parts

    def _new_request(self, body: Generating, model: str, *, chat: bool, id: str) -> GenerationRequest:
        options = body.stream_options
        return GenerationRequest(
            id=id,
            model=model,
            chat=chat,
            stream=bool(body.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            logprobs=None,
            echo=False,
            return_token_ids=bool(body.return_token_ids),
            bell=Bell(self._outbox),
        )

    def _prompts(self, body: CompletionRequest) -> list[list[int]]:
        prompt: Any = body.prompt
        if isinstance(prompt, str):
            return [self.tokenizer.encode(prompt)]
        if not prompt:
            raise ApiError("the prompt is empty; give at least one token", param="prompt")
        if isinstance(prompt[0], int):
            return [self._ids(prompt)]
        if len(prompt) > MOST_PROMPTS:
            raise ApiError(f"a request may have at most {MOST_PROMPTS} prompts", param="prompt")
        return [self.tokenizer.encode(one) if isinstance(one, str) else self._ids(one) for one in prompt]

    def _ids(self, ids: list[int]) -> list[int]:
        if self.vocabulary is not None and ids and max(ids) >= self.vocabulary:
            raise ApiError(f"Token id {max(ids)} is out of vocabulary", param="prompt")
        return ids

    def _check_logprobs(self, logprobs: int | None) -> None:
        if logprobs is not None and logprobs > self._most_logprobs:
            message = (
                "logprobs are not available here"
                if self._most_logprobs < 0
                else (f"at most {self._most_logprobs} logprobs are available")
            )
            raise ApiError(message, param="logprobs")

    def _add(
        self,
        request: GenerationRequest,
        body: Generating,
        prompt: list[int],
        most: int | None,
        adapter: str,
        echo: list[int] | None = None,
    ) -> None:
        self._check_length(len(prompt), most)
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        if body.min_tokens > (most or self.max_model_len):
            raise ApiError(
                f"min_tokens must be less than or equal to max_tokens={most}, got {body.min_tokens}.",
                param="min_tokens",
            )
        sampling = Sampling(
            max_tokens=most,
            min_tokens=body.min_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
            seed=body.seed,
            ignore_eos=body.ignore_eos,
            stop=stop,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop=body.include_stop_str_in_output,
            logprobs=request.logprobs,
        )
        choices = body.n or 1
        if len(request.generations) + choices > MOST_GENERATIONS:
            raise ApiError(f"a request may ask for at most {MOST_GENERATIONS} completions", param="n")
        for choice in range(choices):
            request.generations.append(
                Generation(
                    number=next(self._numbers),
                    prompt=prompt,
                    sampling=sampling,
                    bell=request.bell,
                    adapter=adapter,
                    salt=body.cache_salt or "",
                    priority=body.priority,
                    choice=choice,
                    choices=choices,
                    echo=echo or (),
                )
            )

    def _check_length(self, prompt: int, most: int | None) -> None:
        limit = self.max_model_len
        if not prompt:
            raise ApiError("the prompt is empty; give at least one token", param="prompt")
        if prompt >= limit or (most is not None and prompt + most > limit):
            output_part = "" if most is None else f" you requested {most} output tokens and"
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. However,{output_part} your prompt "
                f"contains {prompt} input tokens. Please reduce the length of the input prompt or the "
                "number of requested output tokens.",
                param="input_tokens",
            )


def _message(turn: ChatMessage, at: int) -> Message:
    """A turn with its content as one text. Errors: ApiError for content that is not text."""
    if isinstance(turn.content, list):
        texts = []
        for part in turn.content:
            text = part.get("text")
            if part.get("type") not in ("text", "input_text", "output_text", "refusal") or not isinstance(
                text, str
            ):
                kind = str(part.get("type"))[:100]
                raise ApiError(
                    f"messages.{at}.content: parts of type {kind!r} are not served here; only text is",
                    param="messages",
                )
            texts.append(text)
        return {"role": turn.role, "content": "\n".join(texts)}
    return {"role": turn.role, "content": turn.content or ""}
