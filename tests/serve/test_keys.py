"""API keys: who may come in, and with how much."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.server import serve

from edge_rt.core import Limits
from edge_rt.errors import ConfigError
from edge_rt.recipes import NullOptions
from edge_rt.runtime.null import NullRunner
from edge_rt.serve.keys import ApiKey, Keys
from edge_rt.serve.state import State
from edge_rt.tokenizer import Tokenizer

LIMITS = Limits(2, 2, 64, 16, 2, 64, 64, 3072)


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_file(path: Path, *tables: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(f"[[key]]\n{table}" for table in tables))
    path.chmod(mode)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys.load(
        key_file(
            tmp_path / "keys.toml",
            f'name = "one"\nsha256 = "{hashed("secret")}"',
            f'name = "three"\nsha256 = "{hashed("schlüssel")}"',
            f'name = "two"\nsha256 = "{hashed("other")}"\npriority = "batch"\nmax_requests = 1',
        )
    )


def test_a_key_is_found_by_its_header(keys: Keys) -> None:
    assert keys.find("Bearer secret") == ApiKey("one", hashed("secret"))
    assert keys.find("bearer  other") == ApiKey("two", hashed("other"), "batch", 1)
    # A client sends its bytes as they are; the header is read as Latin-1.
    assert keys.find("Bearer " + "schlüssel".encode().decode("latin-1")) is not None
    for wrong in (None, "", "secret", "Basic secret", "Bearer", "Bearer ", "Bearer Secret"):
        assert keys.find(wrong) is None
    assert keys.find(f"Bearer {hashed('secret')}") is None


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (['name = "a"\nsha256 = "xyz"'], "sha256 of key 'a' is not 64 hexadecimal digits"),
        ([f'name = "a"\nsha256 = "{"0" * 64}"\nmax_requests = 0'], "max_requests of key 'a'"),
        ([f'name = "a"\nsha256 = "{"0" * 64}"'] * 2, "two keys have the same name"),
        ([f'name = "a"\nkey = "{"0" * 64}"'], "unknown key 'key'"),
        ([f'name = "a"\nsha256 = "{"0" * 64}"\npriority = "high"'], "'high' is not one of"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, tables: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Keys.load(key_file(tmp_path / "keys.toml", *tables))


def test_a_file_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be read by everybody; chmod o-rwx"):
        Keys.load(
            key_file(tmp_path / "keys.toml", f'name = "a"\nsha256 = "{"0" * 64}"', mode=0o644)
        )
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.load(tmp_path / "none.toml")


def test_who_may_do_what(keys: Keys, demo_checkpoint: Path) -> None:
    body: dict[str, Any] = {"prompt": [1], "max_tokens": 20}

    async def use(client: httpx.AsyncClient) -> None:
        async def post(key: str | None, **changes: Any) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return await client.post("/v1/completions", json=body | changes, headers=headers)

        missing = await post(None)
        assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
        assert "carries no API key" in missing.json()["error"]["message"]
        assert "a wrong API key" in (await post("guess")).json()["error"]["message"]
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert (await post("secret")).status_code == 200
        too_many = await post("other", prompt=[[1], [2]])  # however long it waited
        assert too_many.status_code == 400
        assert "2 prompts are more than the 1 that key 'two' may have" in too_many.text
        both = await asyncio.gather(post("other"), post("other"))
        taken, refused = sorted(both, key=lambda one: one.status_code)
        assert (taken.status_code, refused.status_code) == (200, 429)
        assert refused.json()["error"]["code"] == "key_limit"
        assert (await post("other")).status_code == 200  # its place is free again
        document = (await client.get("/openapi.json")).json()
        assert document["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]

    runner = NullRunner(LIMITS, NullOptions(step_ms=5.0))
    serve(runner, Tokenizer.load(demo_checkpoint), use, State(keys=keys))
