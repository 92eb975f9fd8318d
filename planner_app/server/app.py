"""FastAPI application of one replica: OpenAI's and vLLM's routes over a backend."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
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
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pagecast.planner_app.server.serving import Answering
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

Taken = TypeVar("Taken")

_LONGEST_ID = 128
_LONG_BODY = 8192  # bytes; shorter ones are tokenized in less than a millisecond or two
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
        tokenizer = self.intake.tokenizer
        is_long = tokenizer.leaves_lock and len(await request.body()) > _LONG_BODY
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
        return Answering(writer, self.backend, self.metrics.answered)

    def _submit(self, generation: Generation) -> None:
        """Gives a generation to the backend, where not too many requests wait there."""
        most = self.options.max_waiting_queue_length
        if most is not None and self.backend.alive and self.backend.load().waiting >= most:
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

    async def tokenize(self, body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """`POST /tokenize`."""
        ids = await self._take_in(request, self.intake.tokens, body)
        texts = [self.intake.tokenizer.decode((id,)) for id in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self.intake.max_model_len,
            "tokens": ids,
            "token_strs": texts,
        }

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        """`POST /detokenize`."""
        self.intake.model(body.model)
        return {"prompt": self.intake.tokenizer.decode(body.tokens)}

    async def health(self) -> Response:
        """`GET /health`: 200 while requests are served, 503 after a failure and while draining."""
        return Response(status_code=200 if self.backend.alive and not self.draining else 503)

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

    # ---- the application

    def _make_app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            await self.backend.start()
            yield
            await self.backend.stop()
            self._reader.shutdown(wait=False)

        app = FastAPI(title="pagecast", version=__version__, lifespan=lifespan)
        post, get = ["POST"], ["GET"]
        app.add_api_route("/v1/completions", self.completions, methods=post, response_model=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=post, response_model=None)
        app.add_api_route("/v1/models", self.models, methods=get)
        app.add_api_route("/tokenize", self.tokenize, methods=post)
        app.add_api_route("/detokenize", self.detokenize, methods=post)
        for path in ("/health", "/health/ready", "/ping"):
            app.add_api_route(path, self.health, methods=get, response_model=None)
        app.add_api_route("/version", self.version, methods=get)
        app.add_api_route("/metrics", self.scrape, methods=get, response_model=None)
        app.add_api_route("/load", self.load, methods=get)
        app.add_exception_handler(ApiError, self._api_error)
        app.add_exception_handler(RequestValidationError, self._invalid)
        app.add_exception_handler(HTTPException, self._http_error)
        app.add_middleware(
            Guard,
            api_key=self.options.api_key,
            max_body_bytes=self.options.max_body_bytes,
            body_timeout_s=self.options.body_timeout,
            refused=self.metrics.refused,
            clock=self.backend.now,
        )
        return app

    async def _api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.refused(error.status.value)
        return JSONResponse(error.body(), status_code=error.status.value)

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
        return await self._api_error(request, ApiError(str(error.detail), status=status, kind=status.phrase))


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
