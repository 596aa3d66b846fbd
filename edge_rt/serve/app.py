"""The HTTP application: routes, limits, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import edge_rt
from edge_rt.errors import EngineError, RequestError
from edge_rt.serve import schema
from edge_rt.serve.completions import Call, Completions
from edge_rt.serve.errors import Refusal
from edge_rt.serve.front import Front, Ticket

MAX_BODY_BYTES = 8 << 20
SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class State:
    """What the daemon is doing; requests are taken only while it is ready."""

    def __init__(self) -> None:
        self.status = "loading"  # loading, ready, draining, failed
        self.started_at = int(time.time())
        self.queue_limit = 128
        self.completions: Completions | None = None
        self.front: Front | None = None


class CompletionsEndpoint:
    """POST /v1/completions as a bare ASGI application: no layer between a token and its socket."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what its client leaves behind is cancelled."""
        try:
            call, tickets = await self._accept(receive)
        except Refusal as refusal:
            await refusal.response()(scope, receive, send)
            return
        assert self._state.completions is not None
        answer = asyncio.ensure_future(self._answer(call, tickets, scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer
        finally:
            self._state.completions.cancel(tickets)
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _accept(self, receive: Receive) -> tuple[Call, list[Ticket]]:
        state = self._state
        if state.status != "ready" or state.completions is None or state.front is None:
            raise Refusal(503, f"the server is {state.status}", headers={"retry-after": "5"})
        body = parse(await read(receive, MAX_BODY_BYTES))
        try:
            call = await state.completions.understand(body)
            waiting = state.front.alive + len(call.requests)
            if waiting > state.queue_limit:
                raise Refusal(
                    429,
                    f"{state.front.alive} requests are being served or wait; try again",
                    "queue_full",
                    headers={"retry-after": "1"},
                )
            return call, state.completions.submit(call)
        except RequestError as error:
            raise Refusal(400, str(error)) from error
        except EngineError as error:
            raise Refusal(503, str(error), headers={"retry-after": "5"}) from error

    async def _answer(
        self, call: Call, tickets: Sequence[Ticket], scope: Scope, receive: Receive, send: Send
    ) -> None:
        completions = self._state.completions
        assert completions is not None
        if call.body.stream:
            await send({"type": "http.response.start", "status": 200, "headers": SSE})
            async for events in completions.stream(call, tickets):
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        try:
            answer = msgspec.json.encode(await completions.whole(call, tickets))
            response = Response(answer, media_type="application/json")
        except EngineError as error:
            response = Refusal(500, str(error), "engine_error").response()
        await response(scope, receive, send)


def parse(body: bytes) -> schema.CompletionRequest:
    """The request in a body; a Refusal says what is wrong with it, and where."""
    try:
        return schema.decode(body)
    except msgspec.ValidationError as error:
        place = str(error).partition(" - at `$.")[2]
        raise Refusal(422, str(error), param=place.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}", "invalid_json") from error


async def read(receive: Receive, limit: int) -> bytes:
    """A request's body; Refusal if it is longer than `limit` or its client has gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the client has gone")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise Refusal(413, f"the body is longer than {limit} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(state: State) -> Starlette:
    """The application around a state that the daemon moves on."""

    async def models(_request: HttpRequest) -> Response:
        assert state.completions is not None
        one = {
            "id": state.completions.model,
            "object": "model",
            "created": state.started_at,
            "owned_by": "edge_rt",
        }
        return JSONResponse({"object": "list", "data": [one]})

    async def live(_request: HttpRequest) -> Response:
        return JSONResponse({"status": state.status}, 500 if state.status == "failed" else 200)

    async def ready(_request: HttpRequest) -> Response:
        return JSONResponse({"status": state.status}, 200 if state.status == "ready" else 503)

    async def version(_request: HttpRequest) -> Response:
        return JSONResponse({"version": edge_rt.__version__})

    async def chat(_request: HttpRequest) -> Response:
        message = "GPT-J is a base model without a chat format; use /v1/completions"
        return Refusal(404, message, "not_a_chat_model").response()

    async def unknown(request: HttpRequest, _error: Exception) -> Response:
        return Refusal(404, f"there is no {request.method} {request.url.path}").response()

    return Starlette(
        routes=[
            Route("/v1/completions", CompletionsEndpoint(state), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/health", ready),
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/version", version),
        ],
        exception_handlers={404: unknown},
    )
