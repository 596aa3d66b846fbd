"""Refusals in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ErrorDetail(msgspec.Struct):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """What a refused request gets."""

    error: ErrorDetail


class Refusal(Exception):  # noqa: N818 - it is an answer
    """A request that gets no completion; says which status and why."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(self.status, str(self), self.code, self.param)

    def response(self) -> Response:
        """As an answer."""
        return Response(self.body(), self.status, self.headers, "application/json")


def not_ready(why: str) -> Refusal:
    """503, with when to try again."""
    return Refusal(503, why, headers={"retry-after": "5"})


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(message, TYPES[status], param, code)))
