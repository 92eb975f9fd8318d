"""Answers on the wire: an ASGI response for streams and whole answers that notices a leaving client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from pagecast.planner_app.server.answer_json import AnswerWriter
from pagecast.planner_app.server.backend import GenerationBackend
from pagecast.planner_app.server.errors import ApiError
from pagecast.planner_app.server.generation import Generation
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Answering(Response):
    """Sends what a request's generations yield, as it comes or when they have ended.

    `ended` is called with the generations when the answer is over, whichever way.
    """

    def __init__(
        self, writer: AnswerWriter, backend: GenerationBackend, ended: Callable[[list[Generation]], None]
    ) -> None:
        super().__init__()
        self._writer = writer
        self._request = writer.request
        self._backend = backend
        self._ended = ended
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        listening = asyncio.create_task(self._listen(receive))
        try:
            if self._request.stream and self._error() is None:
                await self._stream(send)
            else:
                await self._whole(send)
        except OSError:
            self._gone = True  # the connection broke while it was written to
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening
            for generation in self._request.generations:
                if not generation.done:
                    self._backend.cancel(generation)
            self._ended(self._request.generations)

    async def _listen(self, receive: Receive) -> None:
        """Waits until the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._request.bell.ring()

    def _error(self) -> ApiError | None:
        """Why the request can't be answered."""
        for generation in self._request.generations:
            if generation.finish_reason == "error":
                return generation.error or ApiError(
                    generation.reason, status=HTTPStatus.INTERNAL_SERVER_ERROR
                )
        return None

    async def _stream(self, send: Send) -> None:
        writer = self._writer
        generations = self._request.generations
        bell = self._request.bell
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-request-id", self._request.id.encode("latin-1", "replace")),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        left = len(generations)
        while left:
            text = writer.chunks()
            left = sum(1 for generation in generations if not generation.done) if text else left
            error = self._error()
            if error is not None:
                text += f"data: {json.dumps(error.body())}\n\n"
                left = 0
            if not left:
                text += writer.tail()
            if text:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": bool(left)})
            if left:
                await bell.wait()
            if self._gone:
                return

    async def _whole(self, send: Send) -> None:
        generations = self._request.generations
        while not self._gone and any(not generation.done for generation in generations):
            await self._request.bell.wait()
        if self._gone:
            return
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
