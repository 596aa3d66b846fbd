"""POST /v1/completions over ASGI: limits, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_rt.errors import EngineError, RequestError
from edge_rt.serve import schema
from edge_rt.serve.completions import Call
from edge_rt.serve.errors import Refusal, not_ready
from edge_rt.serve.front import Ticket
from edge_rt.serve.journal import GONE, Entry
from edge_rt.serve.keys import ApiKey
from edge_rt.serve.settings import ServerSettings
from edge_rt.serve.state import State

SSE = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(slots=True, eq=False)
class _Active:
    """A request that is being answered."""

    entry: Entry
    call: Call | None = None
    tickets: Sequence[Ticket] = ()
    charged: int = 0  # of its key's requests
    kept: schema.Completion | None = None  # the answer, if the cache had it
    is_answered: bool = False  # all but the last piece
    is_gone: bool = False  # the client, before that


class ClientGone(Exception):  # noqa: N818 - nobody has erred
    """Before the whole of its request was here."""


class CompletionsEndpoint:
    """POST /v1/completions as a bare ASGI application: no layer between a token and its socket."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; what its client leaves behind is cancelled."""
        active = _Active(Entry(client_of(scope)))
        try:
            await self._serve(active, scope, receive, send)
        finally:
            if active.entry.key is not None:
                self._state.of_key[active.entry.key] -= active.charged
            self._state.metrics.answered[active.entry.status] += 1
            active.entry.write(
                active.call, active.tickets, prompts=self._state.settings.log.prompts
            )

    async def _serve(self, active: _Active, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._accept(active, scope, receive)
        except Refusal as refusal:
            active.entry.status, active.entry.error = refusal.status, str(refusal)
            await refusal.response()(scope, receive, send)
            return
        except ClientGone:
            active.entry.status = GONE
            return
        completions = self._state.completions
        assert completions is not None
        answer = asyncio.ensure_future(self._answer(active, scope, receive, send))
        gone = asyncio.ensure_future(_watch(active, receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            if active.is_gone or not answer.done():
                active.entry.status = GONE
            completions.cancel(active.tickets)
            for task in (answer, gone):
                task.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)

    async def _accept(self, active: _Active, scope: Scope, receive: Receive) -> None:
        state, settings = self._state, self._state.settings.server
        key = authorized(state, scope)
        active.entry.key = None if key is None else key.name
        if state.status != "ready" or state.completions is None or state.front is None:
            raise not_ready(f"the server is {state.status}")
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > settings.max_body_bytes:  # before "100 Continue"
            raise _too_long(settings.max_body_bytes)
        body = parse(await read(receive, settings))
        try:
            active.call = await state.completions.understand(
                body, settings, None if key is None else key.priority
            )
            active.kept = state.cache.get(active.call)
            if active.kept is not None:
                active.entry.is_cached = True
                state.metrics.cached_answers += 1
                return
            wanted = len(active.call.requests)
            _check_fits(wanted, settings, key)
            if state.front.alive + wanted > settings.max_queue:
                raise _busy(f"{state.front.alive} requests wait or are served", "queue_full")
            if key is not None:
                if key.max_requests and state.of_key[key.name] + wanted > key.max_requests:
                    raise _busy(f"key '{key.name}' has as many requests as it may", "key_limit")
                state.of_key[key.name] += wanted
                active.charged = wanted
            active.tickets = state.completions.submit(active.call)
        except RequestError as error:
            raise Refusal(400, str(error)) from error
        except EngineError as error:
            raise not_ready(str(error)) from error

    async def _answer(self, active: _Active, scope: Scope, receive: Receive, send: Send) -> None:
        completions, call = self._state.completions, active.call
        assert completions is not None
        assert call is not None

        active.entry.status = 200
        if call.body.stream:
            await send({"type": "http.response.start", "status": 200, "headers": SSE})
            async for events in completions.stream(call, active.tickets):
                if active.is_gone:  # then `send` says nothing
                    return
                await send({"type": "http.response.body", "body": events, "more_body": True})
            active.is_answered = not active.is_gone
            await send({"type": "http.response.body", "body": b""})
            return
        try:
            answer = active.kept
            if answer is None:
                answer = await completions.whole(call, active.tickets)
                self._state.cache.put(call, answer)
            content = msgspec.json.encode(msgspec.structs.replace(answer, id=call.id))
            response = Response(content, media_type="application/json")
        except EngineError as error:
            active.entry.status, active.entry.error = 500, str(error)
            response = Refusal(500, str(error), "engine_error").response()
        active.is_answered = True
        await response(scope, receive, send)


def _check_fits(prompts: int, settings: ServerSettings, key: ApiKey | None) -> None:
    """RequestError for what no waiting would let in."""
    limits = {"the server takes": settings.max_queue}
    if key is not None and key.max_requests is not None:
        limits[f"key '{key.name}' may have"] = key.max_requests
    for who, limit in limits.items():
        if prompts > limit:
            raise RequestError(f"{prompts} prompts are more than the {limit} that {who} at once")


def _too_long(limit: int) -> Refusal:
    return Refusal(413, f"the body is longer than {limit} bytes")


def _busy(message: str, code: str) -> Refusal:
    return Refusal(429, f"{message}; try again", code, headers={"retry-after": "1"})


def client_of(scope: Scope) -> str | None:
    """The client's address; a Unix socket's has none."""
    client = scope.get("client")
    return client[0] or None if client else None


def authorized(state: State, scope: Scope) -> ApiKey | None:
    """Whose key a request carries; None where nobody needs one, a Refusal for a wrong one."""
    if state.keys is None:
        return None
    given = Headers(scope=scope).get("authorization")
    key = state.keys.find(given)
    if key is None:
        what = "a wrong API key" if given else "no API key"
        raise Refusal(
            401,
            f"the request carries {what}; send it as: Authorization: Bearer KEY",
            "invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
    return key


def parse(body: bytes) -> schema.CompletionRequest:
    """The request in a body; a Refusal says what is wrong with it, and where."""
    try:
        return schema.decode(body)
    except msgspec.ValidationError as error:
        place = str(error).partition(" - at `$.")[2]
        raise Refusal(422, str(error), param=place.rstrip("`") or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"the body is not valid JSON: {error}", "invalid_json") from error


async def read(receive: Receive, settings: ServerSettings) -> bytes:
    """A request's body; Refusal if it is too long or too slow, ClientGone if no more comes."""
    parts, size, limit = [], 0, settings.max_body_bytes
    end_s = time.monotonic() + settings.timeout_s
    while True:
        patience_s = min(settings.slow_client_s, end_s - time.monotonic())
        try:
            message = await asyncio.wait_for(receive(), patience_s)
        except asyncio.TimeoutError:
            headers = {"connection": "close"}
            raise Refusal(408, "the body does not come to its end", headers=headers) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_long(limit)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _watch(active: _Active, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    active.is_gone = not active.is_answered
