"""FastAPI application of one replica: OpenAI's and vLLM's routes over a backend."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from html import escape
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from pagecast import __version__
from pagecast.planner_app.server.answer_json import AnswerWriter, QuotedTokens
from pagecast.planner_app.server.backend import GenerationBackend
from pagecast.planner_app.server.errors import ApiError, not_found, queue_is_full
from pagecast.planner_app.server.generation import Generation
from pagecast.planner_app.server.guard import ARRIVAL, Guard
from pagecast.planner_app.server.intake import GenerationRequest, RequestIntake
from pagecast.planner_app.server.metrics import ServerMetrics
from pagecast.planner_app.server.options import FAILURES, ServeOptions
from pagecast.planner_app.server.protocol import (
    TAGS,
    AdapterRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pagecast.planner_app.server.serving import Answering
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

Taken = TypeVar("Taken")

_LONGEST_ID = 128
_LONG_BODY = 8192  # bytes; shorter ones are tokenized in less than a millisecond or two
_PART = 10_000  # ids of a long answer, written at once
_MOST_ERRORS = 5  # of one body, that the answer names


class ReplicaServer:
    """One replica behind HTTP: backend, intake of requests and metrics. `app` is the ASGI application."""

    def __init__(
        self,
        backend: GenerationBackend,
        intake: RequestIntake,
        metrics: ServerMetrics,
        options: ServeOptions,
    ) -> None:
        self.backend = backend
        self.intake = intake
        self.metrics = metrics
        self.options = options
        self.draining = False
        self.started = int(time.time())
        self._registry = CollectorRegistry()
        self._registry.register(metrics)
        self._random = random.Random(options.seed)
        self._quoted = QuotedTokens(intake.tokenizer) if intake.tokenizer.alone else None
        self._reader = ThreadPoolExecutor(1, "tokenizer")
        self._answering: set[GenerationRequest] = set()
        self._taking_in = 0  # requests that the reader has, or that have come after them
        self.app = self._make_app()

    # ---- answers

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """`POST /v1/completions`."""
        self._maybe_fail()
        made = await self._take_in(request, self.intake.completion, body, _request_id(request))
        return self._answer(made, request.scope[ARRIVAL])

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        self._maybe_fail()
        made = await self._take_in(request, self.intake.chat, body, _request_id(request))
        return self._answer(made, request.scope[ARRIVAL])

    async def _take_in(self, request: Request, make: Callable[..., Taken], *parts: Any) -> Taken:
        """Calls a method of the intake, in a thread where the text is long, so that streams go on meanwhile.

        One thread, and short texts wait for it too: requests are taken in in the order in which they came.
        """
        is_long = len(await request.body()) > _LONG_BODY
        if not (is_long or self._taking_in):
            return make(*parts)
        self._taking_in += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, make, *parts)
        finally:
            self._taking_in -= 1

    def _answer(self, request: GenerationRequest, arrival_ns: int) -> Response:
        for generation in request.generations:
            generation.arrival_ns = arrival_ns
            self._submit(generation)
            if generation.error is not None:
                for other in request.generations:
                    self.backend.cancel(other)
                raise generation.error
        writer = AnswerWriter(request, self.intake.tokenizer, int(time.time()), self._quoted)
        self._answering.add(request)
        return Answering(writer, self.backend, self._answered)

    def _answered(self, request: GenerationRequest) -> None:
        self._answering.discard(request)
        self.metrics.answered(request.generations)

    def end_all(self) -> None:
        """Cuts the answers under way short: their clients get what there is, and its end."""
        for request in list(self._answering):
            for generation in request.generations:
                self.backend.cancel(generation)

    def _submit(self, generation: Generation) -> None:
        """Gives a generation to the backend, where not too many requests wait there."""
        most = self.options.max_waiting_queue_length
        if most is not None and self.backend.alive and self.backend.load().waiting >= most:
            self.metrics.queue_was_full()
            generation.refuse(queue_is_full(most))
        else:
            self.backend.submit(generation)

    def _maybe_fail(self) -> None:
        """Fails as often as the options say. Errors: ApiError."""
        rate = self.options.failure_injection_rate
        if rate and self._random.random() * 100 < rate:
            raise _failure(self._random.choice(self.options.failure_types or FAILURES), self.options.names[0])

    # ---- the rest

    async def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        names = self.options.names
        cards = [self._card(name, self.options.model, None) for name in names]
        cards += [self._card(name, path or name, names[0]) for name, path in self.intake.adapters.items()]
        return {"object": "list", "data": cards}

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "pagecast",
            "root": root,
            "parent": parent,
            "max_model_len": self.intake.max_model_len,
        }

    async def load_adapter(self, body: AdapterRequest) -> Response:
        """`POST /v1/load_lora_adapter`."""
        self.intake.load_adapter(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload_adapter(self, body: AdapterRequest) -> Response:
        """`POST /v1/unload_lora_adapter`: requests under way go on."""
        self.intake.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """`POST /tokenize`."""
        return _JsonText(await self._take_in(request, self._tokenized, body))

    def _tokenized(self, body: TokenizeRequest) -> str:
        ids = self.intake.tokens(body)
        texts = [self.intake.tokenizer.decode((id,)) for id in ids] if body.return_token_strs else None
        # Written in parts: nobody else runs while a list of a million is.
        parts = [",".join(map(str, ids[at : at + _PART])) for at in range(0, len(ids), _PART)]
        counts = f'{{"count": {len(ids)}, "max_model_len": {self.intake.max_model_len}'
        return f'{counts}, "tokens": [{",".join(parts)}], "token_strs": {json.dumps(texts)}}}'

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """`POST /detokenize`."""
        return _JsonText(await self._take_in(request, self._detokenized, body))

    def _detokenized(self, body: DetokenizeRequest) -> str:
        self.intake.model(body.model)
        return json.dumps({"prompt": self.intake.tokenizer.decode(body.tokens)})

    async def health(self) -> Response:
        """`GET /health`: 200 while requests are served, 503 after a failure, also of a recording, and while
        draining."""
        whole = self.backend.alive and not self.draining and not self.backend.unrecorded
        return Response(self.backend.unrecorded, status_code=200 if whole else 503)

    async def version(self) -> dict[str, str]:
        """`GET /version`."""
        return {"version": __version__}

    async def scrape(self) -> Response:
        """`GET /metrics`."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def load(self) -> dict[str, int]:
        """`GET /load`: requests running and waiting."""
        load = self.backend.load()
        return {"server_load": load.running + load.waiting}

    async def docs(self) -> Response:
        """`GET /docs`: the routes, as a page without scripts; `/openapi.json` has their fields."""
        rows = [
            f"<tr><td>{method.upper()} {escape(path)}<td>{escape(about.get('description', ''))}"
            for path, methods in self.app.openapi()["paths"].items()
            for method, about in methods.items()
        ]
        style = "<style>body{font:16px sans-serif;margin:2em}td{padding:.3em 1em .3em 0}</style>"
        title = f"<title>pagecast {__version__}</title>"
        return HTMLResponse(f"<!doctype html>{title}{style}<table>{''.join(rows)}</table>")

    # ---- the application

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            await self.backend.start()
            yield
            await self.backend.stop()
            self._reader.shutdown(wait=False)

        # FastAPI's own pages of the documentation load scripts from elsewhere.
        app = FastAPI(title="pagecast", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
        post, get = ["POST"], ["GET"]
        app.add_api_route("/v1/completions", self.completions, methods=post, response_model=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=post, response_model=None)
        app.add_api_route("/v1/models", self.models, methods=get)
        if self.intake.adapters:
            app.add_api_route("/v1/load_lora_adapter", self.load_adapter, methods=post, response_model=None)
            app.add_api_route(
                "/v1/unload_lora_adapter", self.unload_adapter, methods=post, response_model=None
            )
        app.add_api_route("/tokenize", self.tokenize, methods=post, response_model=None)
        app.add_api_route("/detokenize", self.detokenize, methods=post, response_model=None)
        for path in ("/health", "/health/ready", "/ping"):
            app.add_api_route(path, self.health, methods=get, response_model=None)
        app.add_api_route("/version", self.version, methods=get)
        app.add_api_route("/metrics", self.scrape, methods=get, response_model=None)
        app.add_api_route("/load", self.load, methods=get)
        app.add_api_route("/docs", self.docs, methods=get, include_in_schema=False, response_model=None)
        app.add_exception_handler(ApiError, self._api_error)
        app.add_exception_handler(RequestValidationError, self._invalid)
        app.add_exception_handler(HTTPException, self._http_error)
        app.add_middleware(
            Guard,
            api_keys=self.options.api_key,
            max_body_bytes=self.options.max_body_bytes,
            body_timeout_s=self.options.body_timeout,
            refused=self.metrics.refused,
            clock=self.backend.now,
        )
        if self.options.allowed_hosts:
            app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(self.options.allowed_hosts))
        if self.options.allowed_origins:
            origins, every = list(self.options.allowed_origins), ["*"]
            app.add_middleware(
                CORSMiddleware, allow_origins=origins, allow_methods=every, allow_headers=every
            )
        return app

    async def _api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.refused(error.status.value)
        return JSONResponse(error.body(), status_code=error.status.value, headers=error.headers)

    async def _invalid(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = error.errors()
        first = problems[0] if problems else {"loc": (), "type": "", "msg": "the body is not valid"}
        words = [_words(one) for one in problems[:_MOST_ERRORS]]
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and media != "application/json":
            words = ["Unsupported Media Type: Only 'application/json' is allowed"]  # vLLM's words
        return await self._api_error(request, ApiError("; ".join(words), param=_place(first) or None))

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = HTTPStatus(error.status_code)
        message = str(error.detail)
        if status == HTTPStatus.NOT_FOUND:
            message = f"{request.url.path[:_LONGEST_ID]} is not served here; GET /docs lists what is"
        return await self._api_error(request, ApiError(message, status=status, kind=status.phrase))


class _JsonText(Response):
    """An answer that is JSON already."""

    media_type = "application/json"


def _place(error: Any) -> str:
    """Where in the body an error is: `messages.0.role`."""
    if error["type"] == "json_invalid":
        return ""
    return ".".join(str(part) for part in error["loc"][1:] if part not in TAGS)[:200]


def _words(error: Any) -> str:
    """The message of a validation error: the field, and what is wrong with it."""
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}, at character {error['loc'][-1]}"
    place = _place(error)
    if not place and error["type"] in ("missing", "model_attributes_type"):
        return "the body must be a JSON object"
    words = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    return f"{place}: {words}" if place else words


def _request_id(request: Request) -> str | None:
    """The id that the client gave its request, as far as it can be sent back."""
    text = request.headers.get("x-request-id", "")[:_LONGEST_ID]
    return text if text.isprintable() and text.isascii() and text else None


def _failure(kind: str, model: str) -> ApiError:
    """An injected failure, one of `options.FAILURES`."""
    if kind == "rate_limit":
        return ApiError("Rate limit reached (injected)", status=HTTPStatus.TOO_MANY_REQUESTS)
    if kind == "invalid_api_key":
        return ApiError("Incorrect API key provided (injected)", status=HTTPStatus.UNAUTHORIZED)
    if kind == "context_length":
        return ApiError("This model's maximum context length is exceeded (injected)", param="messages")
    if kind == "invalid_request":
        return ApiError("Invalid request (injected)")
    if kind == "model_not_found":
        return not_found(f"{model} (injected)")
    return ApiError("Server error (injected)", status=HTTPStatus.SERVICE_UNAVAILABLE)
