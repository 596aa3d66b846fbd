"""A client of a running daemon: POST /v1/completions, streamed, each token's arrival noted."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from edge_rt.bench.timer import Timing
from edge_rt.core import FinishReason
from edge_rt.errors import ConfigError, EngineError

SILENCE_S = 660.0  # without a byte; the daemon itself ends a request after 600 s by default
# The daemon's server closes a connection that was idle for 5 s: not to meet it while it does.
KEEP_IDLE_S = 2.0


class Refused(EngineError):  # noqa: N818 - as the daemon's Refusal: it is an answer
    """The daemon has no room for a request now (429)."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon listens: `base` is its URL, `socket` its Unix socket's path if it has one."""

    base: str
    socket: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of http://HOST:PORT, as OpenAI's clients take it with /v1 too, or unix:PATH."""
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/"):
                raise ConfigError(f"'{url}' names no socket; write it as unix:/path/to.sock")
            return cls("http://localhost", path)
        try:
            parts = urlsplit(url)
            usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            usable = None
        base = url.rstrip("/").removesuffix("/v1")
        if not usable or urlsplit(base).path or parts.query or parts.fragment:
            raise ConfigError(
                f"'{url}' is no daemon's URL; write it as http://127.0.0.1:8000 or "
                f"unix:/path/to.sock"
            )
        return cls(base)

    def __str__(self) -> str:
        return self.base if self.socket is None else f"unix:{self.socket}"


def _ignore() -> None:
    pass


class Client:
    """Of one daemon, as an async context manager.

    Its methods raise EngineError for a daemon that is not there, cannot answer, or does not answer
    whole, and ConfigError for an API key that it does not take.
    """

    def __init__(self, address: Address, api_key: str | None = None) -> None:
        self._address = address
        connector: aiohttp.BaseConnector
        if address.socket is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_IDLE_S)
        else:
            connector = aiohttp.UnixConnector(
                address.socket, limit=0, keepalive_timeout=KEEP_IDLE_S
            )
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_S),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def check(self) -> None:
        """Whether the daemon is there, ready, and lets us in."""
        ready = await self._get("/health/ready")
        if ready != 200:
            raise EngineError(
                f"the daemon at {self._address} is not ready (its /health/ready answers {ready}); "
                f"wait until it is"
            )
        await self._get("/v1/models")

    async def _get(self, path: str) -> int:
        with self._errors_told():
            async with self._session.get(self._address.base + path) as response:
                if response.status == 401:
                    raise await _refusal(response)
                return response.status

    async def complete(
        self,
        prompt: str,
        max_tokens: int,
        timing: Timing,
        on_first: Callable[[], None] = _ignore,
    ) -> int:
        """Continue a prompt by `max_tokens` and fill in `timing`; how many tokens the prompt has.

        Refused if there is no room. `on_first` is called at the first token.
        """
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self._address.base}/v1/completions"
        answer = _Answer(timing, on_first)
        with self._errors_told():
            async with self._session.post(url, json=body) as response:
                if response.status != 200:
                    raise await _refusal(response)
                async for data in response.content.iter_any():
                    answer.take(data)
        prompt_tokens = answer.prompt_tokens(max_tokens)
        timing.on_end()
        return prompt_tokens

    @contextlib.contextmanager
    def _errors_told(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or error.os_error
            raise EngineError(
                f"no daemon answers at {self._address} ({reason}); start one with: "
                f"edge-rt serve --bundle BUNDLE"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            what = str(error) or type(error).__name__
            raise EngineError(f"the connection to {self._address} broke: {what}") from error


async def _refusal(response: aiohttp.ClientResponse) -> Exception:
    text = await response.text(errors="replace")
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text.strip()[:200]
    if response.status == 401:
        return ConfigError(
            f"the daemon takes no request of ours: {text}; give a key by --api-key-file FILE or "
            f"the environment's OPENAI_API_KEY"
        )
    kind = Refused if response.status == 429 else EngineError
    return kind(f"the daemon refused a request with {response.status}: {text}")


class _Answer:
    """A stream of completions as it arrives."""

    def __init__(self, timing: Timing, on_first: Callable[[], None]) -> None:
        self._timing, self._on_first = timing, on_first
        self._rest = b""
        self._usage: dict[str, int] = {}

    def take(self, data: bytes) -> None:
        """Note the events in the next bytes; EngineError for one that tells of an error."""
        now_ns = time.monotonic_ns()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._timing.ended_ns = now_ns
                continue
            try:
                self._note(json.loads(event.removeprefix(b"data: ")), now_ns)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise EngineError(f"not an event of a completion: {event[:200]!r}") from error

    def _note(self, event: dict[str, Any], now_ns: int) -> None:
        timing = self._timing
        if "error" in event:
            raise EngineError(f"request {timing.request_id} failed: {event['error']['message']}")
        for choice in event["choices"]:
            timing.token_ns.append(now_ns)
            if len(timing.token_ns) == 1:
                self._on_first()
            if choice["finish_reason"] is not None:
                timing.finish = FinishReason(choice["finish_reason"])
        if event.get("usage"):
            names = ("prompt_tokens", "completion_tokens")
            self._usage = {name: int(event["usage"][name]) for name in names}
            if self._usage["prompt_tokens"] < 1:
                raise ValueError("no prompt has no tokens")

    def prompt_tokens(self, max_tokens: int) -> int:
        """Of the usage; EngineError if the answer is not whole: half of one is no measurement."""
        timing, counted = self._timing, self._usage.get("completion_tokens")
        tokens, finish = len(timing.token_ns), timing.finish
        is_whole = finish is FinishReason.LENGTH and tokens == max_tokens
        if not timing.ended_ns or not is_whole:
            end = f"finish_reason {finish.value}" if finish and timing.ended_ns else "no end"
            raise EngineError(
                f"request {timing.request_id} got {tokens} of {max_tokens} tokens and {end}"
            )
        if counted != tokens:
            raise EngineError(
                f"request {timing.request_id} got {tokens} events and usage says {counted} tokens; "
                f"a daemon that sends one event a token is needed"
            )
        return self._usage["prompt_tokens"]
