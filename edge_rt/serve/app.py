"""The HTTP application: its routes, and the pages that are no completions."""

from __future__ import annotations

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import edge_rt
from edge_rt.serve import openapi, schema
from edge_rt.serve.completions import check_model
from edge_rt.serve.endpoint import CompletionsEndpoint, authorized, client_of
from edge_rt.serve.errors import Refusal, not_ready
from edge_rt.serve.journal import Entry
from edge_rt.serve.state import State
from edge_rt.telemetry.prometheus import Exposition


class Pages:
    """What is answered at once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._exposition = Exposition(state.sources())

    async def models(self, request: Request) -> Response:
        """The one model."""
        return _json(schema.Models([self._model(request)]))

    async def model(self, request: Request) -> Response:
        """It, by its name."""
        found = self._model(request)
        check_model(request.path_params["name"], found.id)
        return _json(found)

    def _model(self, request: Request) -> schema.Model:
        state = self._state
        authorized(state, request.scope)
        if state.completions is None:
            raise not_ready(f"the server is {state.status}")
        return schema.Model(state.model, state.started_at)

    async def live(self, _request: Request) -> Response:
        """Whether the process should go on."""
        failed = self._state.status == "failed"
        return _json(schema.Health(self._state.status), 500 if failed else 200)

    async def ready(self, _request: Request) -> Response:
        """Whether requests are taken."""
        is_ready = self._state.status == "ready"
        return _json(schema.Health(self._state.status), 200 if is_ready else 503)

    async def version(self, _request: Request) -> Response:
        """Of edge_rt."""
        return _json(schema.Version(edge_rt.__version__))

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        page, content_type = self._exposition.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def described(self, _request: Request) -> Response:
        """The OpenAPI document."""
        return _json(openapi.document(keys=self._state.keys is not None))

    async def unknown(self, request: Request, _error: Exception) -> Response:
        """404."""
        path = request.url.path
        what = f"there is no {request.method} {path}"
        if path.startswith("/v1/"):
            what += ": GPT-J is a base model, which completes text; use /v1/completions"
        return Refusal(404, what, "unknown_url").response()

    async def not_allowed(self, request: Request, error: Exception) -> Response:
        """405."""
        headers = error.headers if isinstance(error, HTTPException) else None
        what = f"{request.url.path} takes no {request.method}"
        return Refusal(405, what, "method_not_allowed", headers=headers).response()

    async def refused(self, request: Request, error: Exception) -> Response:
        """As the refusal says."""
        assert isinstance(error, Refusal)
        entry = Entry(client_of(request.scope), status=error.status, error=str(error))
        entry.write(None, (), prompts=False)
        return error.response()

    async def failed(self, _request: Request, error: Exception) -> Response:
        """500 for a fault of ours, which uvicorn logs."""
        return Refusal(500, f"the server failed: {type(error).__name__}").response()


def make_app(state: State) -> Starlette:
    """The application around a state that the daemon moves on."""
    pages = Pages(state)
    app = Starlette(
        routes=[
            Route("/v1/completions", CompletionsEndpoint(state), methods=["POST"]),
            Route("/v1/models", pages.models),
            Route("/v1/models/{name:path}", pages.model),
            Route("/health", pages.ready),
            Route("/health/live", pages.live),
            Route("/health/ready", pages.ready),
            Route("/metrics", pages.metrics),
            Route("/version", pages.version),
            Route("/openapi.json", pages.described),
        ],
        exception_handlers={
            404: pages.unknown,
            405: pages.not_allowed,
            Refusal: pages.refused,
            Exception: pages.failed,
        },
    )
    app.router.redirect_slashes = False  # a redirected POST is a trap
    return app


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
