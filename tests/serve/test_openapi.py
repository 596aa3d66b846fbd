"""What the document says of a server that is not ready."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from edge_rt.serve.app import make_app
from edge_rt.serve.openapi import document
from edge_rt.serve.state import State, Status

OPERATIONS = [
    (path, method) for path, item in document(keys=False)["paths"].items() for method in item
]


@pytest.mark.parametrize("status", ["loading", "failed"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_status_is_documented(path: str, method: str, status: Status) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(State(status=status)))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, json={"prompt": "a"})

    answer = asyncio.run(ask())
    described = document(keys=False)["paths"][path][method]["responses"][str(answer.status_code)]
    assert answer.headers["content-type"].partition(";")[0] in described["content"]
