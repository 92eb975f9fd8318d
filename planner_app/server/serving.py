"""Answers on the wire: an ASGI response for streams and whole answers that notices a leaving client."""

from __future__ import annotations

import asyncio
import json
import types
from collections.abc import Callable, Generator
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from pagecast.planner_app.server.answer_json import AnswerWriter
from pagecast.planner_app.server.backend import GenerationBackend
from pagecast.planner_app.server.errors import ApiError
from pagecast.planner_app.server.intake import GenerationRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OWN_SEND = "pagecast.send"
"""Where a request's scope has the HTTP server's own `send`, without the wrappers of the framework."""


class OwnSend:
    """Outermost application: lets `Answering` send the chunks of streams past the framework.

    Its wrappers of `send` note that an answer has begun, and pass every further message on.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[OWN_SEND] = send
        await self._app(scope, receive, send)


class Answering(Response):
    """Sends what a request's generations yield, as it comes or when they have ended.

    Chunks are sent by the outbox, not by a task for each stream: waking a task costs more than a chunk.
    `ended` is called with the request when the answer is over, whichever way.
    """

    def __init__(
        self, writer: AnswerWriter, backend: GenerationBackend, ended: Callable[[GenerationRequest], None]
    ) -> None:
        super().__init__()
        self._writer = writer
        self._request = writer.request
        self._backend = backend
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        listening = asyncio.create_task(self._listen(receive))
        try:
            if self._request.stream and self._error() is None:
                await self._stream(scope.get(OWN_SEND, send), send)
            else:
                await self._whole(send)
        except OSError:
            pass  # the connection broke while it was written to
        finally:
            self._request.bell.leave()
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
            for generation in self._request.generations:
                if not generation.done:
                    self._backend.cancel(generation)
            self._ended(self._request)

    async def _listen(self, receive: Receive) -> None:
        """Waits until the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._over.done():
            self._over.set_result(None)

    def _error(self) -> ApiError | None:
        """Why the request can't be answered."""
        for generation in self._request.generations:
            if generation.finish_reason == "error":
                return generation.error or ApiError(
                    generation.reason, status=HTTPStatus.INTERNAL_SERVER_ERROR
                )
        return None

    async def _stream(self, chunk_send: Send, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-request-id", self._request.id.encode("latin-1", "replace")),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stream = TokenStream(self._writer, chunk_send, self._over, self._error)
        self._request.bell.listen(stream.push)
        await self._over

    async def _whole(self, send: Send) -> None:
        generations = self._request.generations

        def look() -> None:
            if not self._over.done() and all(generation.done for generation in generations):
                self._over.set_result(None)

        self._request.bell.listen(look)
        look()
        await self._over
        if not all(generation.done for generation in generations):
            return  # the client has left
        error = self._error()
        status = 200 if error is None else error.status.value
        body = json.dumps(self._writer.whole() if error is None else error.body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self._request.id.encode("latin-1", "replace")),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class TokenStream:
    """Writes one stream's chunks as they come, until its end or an error.

    `over` is resolved when the end has been sent. While the client is too slow to read, what comes is kept
    and sent as one chunk.
    """

    __slots__ = ("_error", "_generations", "_over", "_send", "_waiting", "_writer")

    def __init__(
        self,
        writer: AnswerWriter,
        send: Send,
        over: asyncio.Future[None],
        error: Callable[[], ApiError | None],
    ) -> None:
        self._writer = writer
        self._generations = writer.request.generations
        self._send = send
        self._over = over
        self._error = error
        self._waiting: asyncio.Task[None] | None = None  # for a slow client

    def push(self) -> None:
        """Sends what has come since the last time. It never raises: `over` gets what goes wrong."""
        if self._waiting is not None or self._over.done():
            return
        try:
            self._push()
        except Exception as error:
            self._end(error)

    def _push(self) -> None:
        body = self._writer.chunks()
        reasons = [generation.finish_reason for generation in self._generations]
        more = "" in reasons and "error" not in reasons
        if not more:
            error = self._error()
            if error is not None:
                body += f"data: {json.dumps(error.body())}\n\n".encode()
            body += self._writer.tail()
        if not body:
            return
        # A server's `send` is done at once, save where the client doesn't read.
        sending = self._send({"type": "http.response.body", "body": body, "more_body": more}).__await__()
        try:
            awaited = next(sending)
        except StopIteration:
            if not more:
                self._end(None)
            return
        self._waiting = asyncio.ensure_future(self._wait(sending, awaited, more))

    async def _wait(self, sending: Generator[Any, Any, None], awaited: Any, more: bool) -> None:
        """Goes on with a chunk that couldn't be sent at once."""
        try:
            await _continued(sending, awaited)
        except Exception as error:
            self._end(error)
            return
        self._waiting = None
        if more:
            self.push()
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)


@types.coroutine
def _continued(sending: Generator[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """A coroutine that has begun already, and which waits for `awaited`."""
    while True:
        try:
            value = yield awaited
        except BaseException as error:
            awaited = sending.throw(error)
        else:
            try:
                awaited = sending.send(value)
            except StopIteration:
                return
