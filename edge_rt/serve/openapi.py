"""The OpenAPI document, from the types that bodies are checked with."""

from __future__ import annotations

from typing import Any

import msgspec

import edge_rt
from edge_rt.serve.errors import ErrorBody
from edge_rt.serve.schema import Completion, CompletionRequest, Health, Model, Models, Version

METRICS_TYPES = ("text/plain", "application/openmetrics-text")
REF = "#/components/schemas/{name}"


def document(*, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1; `keys` whether requests need an API key."""
    types = [CompletionRequest, Completion, ErrorBody, Model, Models, Health, Version]
    _, components = msgspec.json.schema_components(types, ref_template=REF)
    refusals = {"400": "cannot be served", "404": "is of another model"}
    refusals |= {"408": "does not come to its end", "413": "is too long"}
    refusals |= {"422": "does not fit the types", "429": "finds a full queue"}
    refusals |= {"500": "met an engine that failed", "503": "came while the server loads or drains"}
    secured = {"401": "carries no valid API key"} if keys else {}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "edge_rt", "version": edge_rt.__version__},
        "paths": {
            "/v1/completions": {
                "post": {
                    "operationId": "complete",
                    "summary": "Continue prompts, as OpenAI's API does.",
                    "requestBody": {"required": True, "content": _json("CompletionRequest")},
                    "responses": {
                        "200": {
                            "description": "The completion, or its events where `stream` is true.",
                            "content": {
                                **_json("Completion"),
                                "text/event-stream": {"schema": {"type": "string"}},
                            },
                        },
                        **_refusals(refusals | secured),
                    },
                }
            },
            "/v1/models": {"get": _get("models", "The model.", "Models", _refusals(secured))},
            "/v1/models/{name}": {"get": _named_model(secured)},
            "/health": {"get": _health("health")},
            "/health/live": {"get": _health("live", "500")},
            "/health/ready": {"get": _health("ready")},
            "/metrics": {"get": _metrics()},
            "/version": {"get": _get("version", "Of edge_rt.", "Version", {})},
        },
        "components": {"schemas": components},
    }
    if keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path in ("/v1/completions", "/v1/models", "/v1/models/{name}"):
            for operation in found["paths"][path].values():
                operation["security"] = [{"key": []}]
    return found


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=name)}}}


def _refusals(meanings: dict[str, str]) -> dict[str, Any]:
    return {
        status: {"description": f"The request {meaning}.", "content": _json("ErrorBody")}
        for status, meaning in meanings.items()
    }


def _get(name: str, what: str, schema: str, others: dict[str, Any]) -> dict[str, Any]:
    answer = {"description": what, "content": _json(schema)}
    return {"operationId": name, "summary": what, "responses": {"200": answer, **others}}


def _named_model(secured: dict[str, str]) -> dict[str, Any]:
    others = _refusals({"404": "is of another model"} | secured)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return _get("model", "The model, by its name.", "Model", others) | {"parameters": [name]}


def _metrics() -> dict[str, Any]:
    text = {kind: {"schema": {"type": "string"}} for kind in METRICS_TYPES}
    answer = {"description": "In the format that Accept asks for.", "content": text}
    what = "What Prometheus scrapes."
    return {"operationId": "metrics", "summary": what, "responses": {"200": answer}}


def _health(name: str, bad: str = "503") -> dict[str, Any]:
    other = {bad: {"description": "It is not.", "content": _json("Health")}}
    return _get(name, f"Whether the server is {name}.", "Health", other)
