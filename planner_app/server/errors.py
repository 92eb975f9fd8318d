"""Errors that a client gets, in the shape in which vLLM sends them."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class ApiError(Exception):
    """A request that can't be served: HTTP status, message, and the parameter at fault if there is one."""

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.kind = kind or _kind(status)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"retry-after": "1"} if self.status == HTTPStatus.TOO_MANY_REQUESTS else {}

    def body(self) -> dict[str, Any]:
        """The body of the answer: `{"error": {message, type, param, code}}`."""
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status.value}
        return {"error": fields}


def _kind(status: HTTPStatus) -> str:
    kinds = {
        HTTPStatus.BAD_REQUEST: "BadRequestError",
        HTTPStatus.NOT_FOUND: "NotFoundError",
        HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
        HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    }
    return kinds.get(status, status.phrase)


def queue_is_full(waiting: int) -> ApiError:
    """The answer where `waiting` requests wait already, as many as may."""
    return ApiError(
        f"the waiting queue is full: {waiting} requests wait; try again later",
        status=HTTPStatus.TOO_MANY_REQUESTS,
    )


def backend_failed(backend: str, reason: object) -> ApiError:
    """The answer of a server whose backend, "engine" or "simulation", has failed."""
    return ApiError(f"the {backend} has failed: {reason}", status=HTTPStatus.INTERNAL_SERVER_ERROR)


def not_found(model: str) -> ApiError:
    """The answer to a model's name that is not served here."""
    message = f"The model `{model}` does not exist."
    return ApiError(message, status=HTTPStatus.NOT_FOUND, param="model")
