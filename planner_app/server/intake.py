"""Intake of requests: checks their bodies and makes generations of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count
from typing import Any
from uuid import uuid4

from pagecast.planner_app.server.errors import ApiError, not_found
from pagecast.planner_app.server.forms import AnswerForm, ToolCall, answer_form, tool_names
from pagecast.planner_app.server.generation import Bell, Generation, Outbox, Sampling
from pagecast.planner_app.server.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Generating,
    TokenizeRequest,
)
from pagecast.planner_app.server.tokenizer import Message, PackedTokenizer, Tokenizer

MOST_PROMPTS = 1024  # in one request
MOST_GENERATIONS = 4096
_NAMING = 4096  # characters of a prompt, by which a made-up answer is drawn


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """A request as it will be answered: its generations, in the order of their `index`.

    `logprobs`: how many alternatives a client gets for each token; None: no log probabilities. `call`: the
    call of a tool that its answers are; None for text.
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
    call: ToolCall | None = None
    generations: list[Generation] = field(default_factory=list)


class RequestIntake:
    """Makes generations of requests, and refuses those that can't be served.

    `vocabulary`: of the model; by default the tokenizer's. `most_logprobs` -1: none are available. `echoes`:
    generations get the tokens of the last message. `forms`: answers can be given the form that a request asks
    for.
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
        forms: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.names = names
        self.adapters = adapters
        self.max_model_len = max_model_len
        self.vocabulary = vocabulary or tokenizer.vocabulary
        self._packed = tokenizer if isinstance(tokenizer, PackedTokenizer) else None
        self._forms = forms
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
        if body.prompt_logprobs is not None:
            raise ApiError("logprobs of the prompt are not available here", param="prompt_logprobs")
        form = self._form(body, str(body.prompt)[:_NAMING])
        for prompt in prompts:
            self._add(request, body, prompt, body.max_tokens, adapter, form=form)
        return request

    def chat(self, body: ChatRequest, request_id: str | None) -> GenerationRequest:
        """The generations of a chat request. Errors: ApiError."""
        name, adapter = self.model(body.model)
        if body.prompt_logprobs is not None:
            raise ApiError("logprobs of the prompt are not available here", param="prompt_logprobs")
        messages, text = self._conversation(body)
        form = self._form(body, text[-_NAMING:])
        prompt = self._encode(text)
        request = self._new_request(body, name, chat=True, id=f"chatcmpl-{request_id or uuid4().hex}")
        if body.logprobs:
            request.logprobs = body.top_logprobs or 0
        self._check_logprobs(request.logprobs)
        most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        echo = self.tokenizer.encode(messages[-1]["content"]) if self._echoes else None
        request.call = None if form is None else form.call
        self._add(request, body, prompt, most, adapter, echo=echo, form=form)
        return request

    def tokens(self, body: TokenizeRequest) -> list[int]:
        """The token ids of a prompt or conversation. Errors: ApiError."""
        self.model(body.model)
        if body.prompt is not None:
            return self.tokenizer.encode(body.prompt)
        return self.tokenizer.encode(self._conversation(body)[1])

    def model(self, name: str | None) -> tuple[str, str]:
        """The served name that was asked for, and its adapter ("" for none). Errors: ApiError."""
        if name is None or name == "":
            return self.names[0], ""
        if name in self.adapters:
            return name, name
        if name not in self.names:
            raise not_found(name[:200])
        return name, ""

    def load_adapter(self, name: str, path: str) -> None:
        """Serves one more adapter. Errors: ApiError, in vLLM's words, for a name that is taken."""
        if name in self.adapters or name in self.names:
            raise ApiError(f"The lora adapter '{name[:200]}' has already been loaded.", param="lora_name")
        self.adapters[name] = path

    def unload_adapter(self, name: str) -> None:
        """Serves an adapter no more. Errors: ApiError."""
        if self.adapters.pop(name, None) is None:
            message = f"The lora adapter '{name[:200]}' cannot be found."
            raise ApiError(message, status=HTTPStatus.NOT_FOUND, param="lora_name")

    # ---- parts

    def _conversation(self, body: ChatRequest | TokenizeRequest) -> tuple[list[Message], str]:
        """The turns, and the text that the model gets. Errors: ApiError."""
        tool_names(body.tools)
        messages = [_message(turn, at) for at, turn in enumerate(body.messages or [])]
        generate = body.add_generation_prompt
        return messages, self.tokenizer.chat(messages, generate=generate, tools=body.tools)

    def _encode(self, text: str) -> list[int]:
        """The tokens of a prompt. Errors: ApiError for one that is too long, before the work where it can be
        told."""
        least = -(-len(text) // self.tokenizer.most_characters)
        if least >= self.max_model_len:
            self._check_length(least, None, "at least ")
        return self.tokenizer.encode(text)

    def _form(self, body: Generating, prompt: str) -> AnswerForm | None:
        form = answer_form(body, prompt)
        if form is not None and not self._forms:
            raise ApiError("answers in a given form, and calls of tools, are not available here")
        return form

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
            return [self._encode(prompt)]
        if not prompt:
            raise ApiError("the prompt is empty; give at least one token", param="prompt")
        if isinstance(prompt[0], int):
            return [self._ids(prompt)]
        if len(prompt) > MOST_PROMPTS:
            raise ApiError(f"a request may have at most {MOST_PROMPTS} prompts", param="prompt")
        return [self._encode(one) if isinstance(one, str) else self._ids(one) for one in prompt]

    def _ids(self, ids: list[int]) -> list[int]:
        self._check_length(len(ids), None)
        beyond = {id for id in ids if id >= self.vocabulary}
        if self._packed is not None:
            beyond = {id for id in beyond if not self._packed.makes(id)}
        if beyond:
            raise ApiError(f"Token id {max(beyond)} is out of vocabulary", param="prompt")
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
        *,
        echo: list[int] | None = None,
        form: AnswerForm | None = None,
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
        formed = [] if form is None else self.tokenizer.encode(form.text)
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
                    form=formed,
                )
            )

    def _check_length(self, prompt: int, most: int | None, least: str = "") -> None:
        limit = self.max_model_len
        if not prompt:
            raise ApiError("the prompt is empty; give at least one token", param="prompt")
        if prompt >= limit or (most is not None and prompt + most > limit):
            output_part = "" if most is None else f" you requested {most} output tokens and"
            raise ApiError(
                f"This model's maximum context length is {limit} tokens. However,{output_part} your prompt "
                f"contains {least}{prompt} input tokens. Please reduce the length of the input prompt or the "
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
        content = "\n".join(texts)
    else:
        content = turn.content or ""
    message: Message = {"role": turn.role, "content": content}
    message |= {name: text for name in ("name", "tool_call_id") if (text := getattr(turn, name)) is not None}
    if turn.tool_calls:
        message["tool_calls"] = [_tool_call(call, f"messages.{at}.tool_calls") for call in turn.tool_calls]
    return message


def _tool_call(call: dict[str, Any], place: str) -> dict[str, Any]:
    """A call of an earlier turn, with its arguments as values: so templates take them. Errors: ApiError."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{place}: a call needs a function with a name", param="messages")
    arguments = function.get("arguments") or "{}"
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise ApiError(f"{place}: the arguments are no JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": values}}
