"""Clients of a daemon as they come: half of them leave in the middle, some send nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from soak_pool import LONG, Known
from soak_wire import Head, Wire, request

PATIENCE_S = 120  # for one request: longer is a hang
MAX_FAULTS = 20

KINDS = {
    "whole": 12,
    "stream": 14,
    "slow_reader": 4,
    "timeout": 8,
    # Half of all are cut off by their client.
    "leaves_before_answer": 12,
    "leaves_queue": 12,
    "leaves_stream": 16,
    "leaves_in_body": 6,
    "leaves_in_head": 4,
    # Nonsense.
    "bad_json": 2,
    "bad_types": 2,
    "too_long": 2,
    "bad_token": 1,
    "wrong_model": 1,
    "wrong_method": 1,
    "wrong_path": 1,
    "garbage": 1,
    "bad_chunk": 1,
}
NONSENSE: dict[str, tuple[int, Any]] = {  # the status that it gets, and the body
    "bad_json": (400, b'{"prompt": "x", '),
    "bad_types": (422, {"prompt": "x", "max_tokens": "many"}),
    "too_long": (400, {"prompt": [1] * 6000}),
    "bad_token": (400, {"prompt": [10**6]}),
    "wrong_model": (404, {"prompt": "x", "model": "gpt-4"}),
}
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"\xff" * 3000 + b"\r\n\r\n",  # without an end of line it would be waited for
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: many\r\n\r\n",
    b"GET\r\n\r\n",
)
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: soak\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Seen:
    """What clients saw, to be compared with the daemon's log."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)  # of those that wait and are logged
    left: int = 0  # logged, but their client did not wait for the status
    answers: list[tuple[str, bool, dict[str, int]]] = field(default_factory=list)
    left_ids: list[str] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    checked: int = 0

    def fault(self, what: str | None) -> None:
        """Note one; the first few are enough."""
        if what is not None and len(self.faults) < MAX_FAULTS:
            self.faults.append(what)

    def add(self, other: Seen) -> None:
        """Take in what others saw."""
        self.kinds += other.kinds
        self.statuses += other.statuses
        self.left += other.left
        self.checked += other.checked
        for name in ("answers", "left_ids", "latency_s", "ttft_s", "faults"):
            getattr(self, name).extend(getattr(other, name))


def run(port: int, clients: int, seconds: float, seed: int, pool: list[Known]) -> Seen:
    """Be `clients` clients for some time; in a process of its own that gives way to the daemon."""
    os.nice(10)
    return asyncio.run(_run(port, clients, seconds, seed, pool))


async def _run(port: int, clients: int, seconds: float, seed: int, pool: list[Known]) -> Seen:
    seen, until = Seen(), time.monotonic() + seconds
    several = [Client(port, random.Random(f"{seed}-{i}"), pool, seen) for i in range(clients)]  # noqa: S311
    await asyncio.gather(*(one.live(until) for one in several))
    return seen


class Client:
    """One request after the other, on connections that it may use again."""

    def __init__(self, port: int, draw: random.Random, pool: list[Known], seen: Seen) -> None:
        self._port, self._draw, self._pool, self._seen = port, draw, pool, seen
        self._wire: Wire | None = None

    async def live(self, until: float) -> None:
        """Until then, and the request that is under way."""
        await asyncio.sleep(self._draw.random())
        while time.monotonic() < until:
            (kind,) = self._draw.choices(list(KINDS), list(KINDS.values()))
            self._seen.kinds[kind] += 1
            try:
                await asyncio.wait_for(self._one(kind), PATIENCE_S)
            except (OSError, EOFError, ValueError, KeyError, asyncio.TimeoutError) as error:
                self._seen.fault(f"{kind}: {type(error).__name__}: {error}")
                self._drop()
            if self._draw.random() < 0.3:
                self._drop()
            await asyncio.sleep(self._draw.expovariate(20))
        self._drop()

    async def _one(self, kind: str) -> None:
        if kind in NONSENSE:
            status, body = NONSENSE[kind]
            head = await self._refused(status, *request(body))
            self._seen.statuses[head.status] += 1
        elif kind == "wrong_method":
            await self._refused(405, *request(b"", method="PUT"))
        elif kind == "wrong_path":
            await self._refused(404, *request({"prompt": "x"}, path="/v1/chat/completions"))
        elif kind in {"garbage", "bad_chunk"}:
            await self._garbage(kind)
        elif kind.startswith("leaves"):
            await self._leave(kind)
        else:
            await self._wait(kind)

    def _drop(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    async def _open(self, *, small: bool = False) -> Wire:
        if small:
            self._drop()
        if self._wire is None:
            self._wire = await Wire.open(self._port, small=small)
        return self._wire

    async def _refused(self, status: int, *parts: bytes) -> Head:
        wire = await self._open()
        await wire.send(b"".join(parts))
        head, content = await wire.all()
        # A full queue may answer before the request is looked at.
        if head.status not in {status, 429} or "error" not in json.loads(content):
            self._seen.fault(f"expected {status}, got {head.status}: {content[:200]!r}")
        if head.fields.get("connection") == "close":
            self._drop()
        return head

    async def _garbage(self, kind: str) -> None:
        self._drop()
        wire = await self._open()
        if kind == "bad_chunk":
            self._seen.left += 1  # its end, not its status: the HTTP library answers for the daemon
            await wire.send(CHUNKED + b'7\r\n{"promp\r\nzz\r\n')
        else:
            await wire.send(self._draw.choice(GARBAGE))
        head, _ = await wire.all()
        if head.status != 400:
            self._seen.fault(f"{kind} got {head.status}")
        self._drop()

    async def _leave(self, kind: str) -> None:
        draw, known = self._draw, self._draw.choice(self._pool)
        stream = kind == "leaves_stream" or draw.random() < 0.5
        body = known.body | {"stream": stream and "best_of" not in known.body}
        head, content = request(body)
        wire = await self._open()
        if kind == "leaves_in_head":
            await wire.send(head[: draw.randrange(1, len(head) - 3)])
            await asyncio.sleep(draw.choice((0, 0.1, 2)))
            self._drop()
            return
        self._seen.left += 1
        if kind == "leaves_in_body":
            await wire.send(head + content[: draw.randrange(len(content))])
            await asyncio.sleep(draw.choice((0, 0.1, 3)))
        else:
            await wire.send(head + content)
            if kind == "leaves_stream":
                await self._read_some(wire, draw.randrange(1, 40))
            else:
                await asyncio.sleep(draw.expovariate(200 if kind == "leaves_before_answer" else 2))
        self._drop()

    async def _read_some(self, wire: Wire, pieces: int) -> None:
        head, read, found = await wire.head(), 0, ""
        async for piece in wire.pieces(head):
            if head.status == 200 and not found:
                found = json.loads(piece.removeprefix(b"data: ").partition(b"\n")[0])["id"]
                self._seen.left_ids.append(found)
            read += 1
            if read >= pieces:
                return

    def _known(self, *without: str) -> Known:
        while True:
            known = self._draw.choice(self._pool)
            if not any(name in known.body for name in without):
                return known

    async def _wait(self, kind: str) -> None:
        draw, seen = self._draw, self._seen
        short, slow = kind == "timeout", kind == "slow_reader"
        stream = slow or kind == "stream" or (short and draw.random() < 0.5)
        without = ("best_of", "stop", "logprobs") if short else ("best_of",) if stream else ()
        known = draw.choice(self._pool[:LONG]) if slow else self._known(*without)
        body = dict(known.body)
        if short:
            body["timeout_s"] = draw.uniform(0.005, 0.5)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        wire = await self._open(small=slow)
        begun = time.monotonic()
        await wire.send(b"".join(request(body)))
        head = await wire.head()
        seen.statuses[head.status] += 1
        pieces: list[bytes] = []
        async for piece in wire.pieces(head):
            if stream and not pieces and head.status == 200:
                seen.ttft_s.append(time.monotonic() - begun)
            pieces.append(piece)
            if slow:
                await asyncio.sleep(draw.expovariate(60))
        if slow:
            self._drop()
        if head.status == 429 and "retry-after" in head.fields:
            await asyncio.sleep(draw.uniform(0.2, 1))
        elif head.status != 200:
            seen.fault(f"{kind} got {head.status}: {b''.join(pieces)[:200]!r}")
        else:
            if not stream:
                seen.latency_s.append(time.monotonic() - begun)
            self._check(known, b"".join(pieces), stream=stream, short=short)

    def _check(self, known: Known, content: bytes, *, stream: bool, short: bool) -> None:
        answer = joined(content) if stream else json.loads(content)
        choices, usage = answer["choices"], answer["usage"]
        self._seen.answers.append((answer["id"], stream, usage))
        self._seen.checked += 1
        if short:
            self._seen.fault(known.fault_cut_short(choices))
        elif stream:
            self._seen.fault(known.streamed().fault(choices, usage))
        else:
            self._seen.fault(known.fault(choices, usage))


def joined(content: bytes) -> dict[str, Any]:
    """The answer that a stream's events make; ValueError if it is not whole."""
    *events, last, rest = content.decode().split("\n\n")
    if (last, rest) != ("data: [DONE]", ""):
        raise ValueError(f"a stream ends with {last!r}")
    choices: dict[int, dict[str, Any]] = {}
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    if len({event.get("id") for event in found}) != 1:
        raise ValueError(f"a stream is not of one answer: {content[-300:]!r}")
    for piece in (piece for event in found for piece in event["choices"]):
        choice = choices.setdefault(piece["index"], {"text": "", "finish_reason": None})
        if choice["finish_reason"] is not None:
            raise ValueError(f"a choice goes on after its end: {piece}")
        choice["text"] += piece["text"]
        choice["finish_reason"] = piece["finish_reason"]
    in_order = [choices[index] for index in sorted(choices)]
    return {"id": found[0]["id"], "choices": in_order, "usage": found[-1]["usage"]}
