"""Guard in front of the server: API key, and the size and pace of bodies. Plain ASGI middleware."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

from pagecast.planner_app.server.errors import ApiError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ARRIVAL = "pagecast.arrival_ns"
"""Where a request's scope has the time at which the last of its body had come."""

_GUARDED = ("/v1", "/tokenize", "/detokenize", "/docs", "/openapi.json")
_MOST_DISCARDED = 1 << 30  # bytes of a body that is too long


class Guard:
    """Refuses requests without one of the keys, and with bodies that are too long or come too slowly.

    `refused` is called with the status of each refusal. `clock` gives the time of a request's arrival.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        max_body_bytes: int,
        body_timeout_s: float,
        refused: Callable[[int], None],
        clock: Callable[[], int],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes
        self._timeout_s = body_timeout_s
        self._refused = refused
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self._keys and scope["path"].startswith(_GUARDED) and not self._has_key(headers):
            self._refused(401)
            await _answer(send, 401, {"error": "Unauthorized"})
            return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            await self._discard(receive)
            await self._refuse(send, self._too_long())
            return
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._body(receive)
        except ApiError as error:
            await self._refuse(send, error)
            return
        if body is not None:
            scope[ARRIVAL] = self._clock()
            await self._app(scope, _BodyReplay(body, receive), send)

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # All are compared, so that the time taken does not tell which was meant.
        matches = [secrets.compare_digest(key.strip(), own) for own in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None where the client left meanwhile. Errors: ApiError."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    more = message.get("more_body", False)
                    if size > self._max_body_bytes:
                        break
                    parts.append(part)
                    if not more:
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                f"the request's body did not arrive within {self._timeout_s:g} s",
                status=HTTPStatus.REQUEST_TIMEOUT,
            ) from None
        parts.clear()
        if more:
            await self._discard(receive)
        raise self._too_long()

    async def _discard(self, receive: Receive) -> None:
        """Takes what is left of a body: a client that still sends would never read the answer."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while size < _MOST_DISCARDED:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    def _too_long(self) -> ApiError:
        return ApiError(
            f"the request's body is longer than {self._max_body_bytes} bytes",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )

    async def _refuse(self, send: Send, error: ApiError) -> None:
        self._refused(error.status.value)
        await _answer(send, error.status.value, error.body(), close=True)


class _BodyReplay:
    """Hands a body on that has been read already, and then what the client does."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


async def _answer(send: Send, status: int, body: object, *, close: bool = False) -> None:
    text = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})
