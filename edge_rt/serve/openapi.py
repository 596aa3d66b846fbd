"""The OpenAPI document, from the types that bodies are checked with."""

from __future__ import annotations

from typing import Any

import msgspec

import edge_rt
from edge_rt.serve.errors import ErrorBody
from edge_rt.serve.schema import (
    BIAS_KEY,
    MAX_PROMPTS,
    Completion,
    CompletionRequest,
    Health,
    Model,
    Models,
    Version,
)

METRICS_TYPES = ("text/plain", "application/openmetrics-text")
REF = "#/components/schemas/{name}"

# What is beyond the types, and `schema.prompts` and `Completions` check.
TEXT = {"type": "string", "minLength": 1}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = [TEXT, TOKENS] + [
    {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_PROMPTS}
    for one in (TEXT, TOKENS)
]

# OpenAPI has no word for streams before 3.2; that the schema is one event's is the custom.
EVENT = {
    "type": "object",
    "properties": {
        "data": {
            "anyOf": [
                {"const": "[DONE]", "description": "The end."},
                {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": {
                        "anyOf": [
                            {"$ref": REF.format(name=name)} for name in ("Completion", "ErrorBody")
                        ]
                    },
                },
            ]
        }
    },
    "required": ["data"],
}


def document(*, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1; `keys` whether requests need an API key."""
    types = [CompletionRequest, Completion, ErrorBody, Model, Models, Health, Version]
    _, components = msgspec.json.schema_components(types, ref_template=REF)
    fields = components["CompletionRequest"]["properties"]
    fields["prompt"]["anyOf"] = PROMPT
    fields["logit_bias"]["anyOf"][0]["propertyNames"] = {"pattern": f"^({BIAS_KEY})$"}
    refusals = {"400": "cannot be served", "404": "is of another model"}
    refusals |= {"408": "does not come to its end", "413": "is too long"}
    refusals |= {"422": "does not fit the types", "429": "finds a full queue"}
    refusals |= {"500": "met an engine that failed", "503": "came while the server loads or drains"}
    unready = {"503": "came while the server loads"}
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
                                "text/event-stream": {"schema": EVENT},
                            },
                        },
                        **_refusals(refusals | secured),
                    },
                }
            },
            "/v1/models": {
                "get": _get("models", "The model.", "Models", _refusals(unready | secured))
            },
            "/v1/models/{name}": {"get": _named_model(unready | secured)},
            "/health": {"get": _health("health", "Whether requests are taken.", "503")},
            "/health/live": {"get": _health("live", "Whether the engine lives.", "500")},
            "/health/ready": {"get": _health("ready", "As /health.", "503")},
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


def _named_model(others: dict[str, str]) -> dict[str, Any]:
    refusals = _refusals({"404": "is of another model"} | others)
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return _get("model", "The model, by its name.", "Model", refusals) | {"parameters": [name]}


def _metrics() -> dict[str, Any]:
    text = {kind: {"schema": {"type": "string"}} for kind in METRICS_TYPES}
    answer = {"description": "In the format that Accept asks for.", "content": text}
    what = "What Prometheus scrapes."
    return {"operationId": "metrics", "summary": what, "responses": {"200": answer}}


def _health(name: str, what: str, bad: str) -> dict[str, Any]:
    other = {bad: {"description": "No.", "content": _json("Health")}}
    return _get(name, what, "Health", other)
