"""How many tokens a second the daemon streams, and how soon it answers /health meanwhile.

    python tools/serve_speed.py NULL_BUNDLE --prefill CPU_BUNDLE --json serve_speed.json

Streams of the null engine, which takes no time: what is measured is the scheduler, detokenizer,
stop check, usage, metrics, HTTP and this client, which counts events, one a token. /health is asked
by another process, on a connection of its own each time: while nothing runs, under the streams, and
while CPU_BUNDLE's engine reads long prompts.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import command
from command import progress

from edge_rt.bench import daemon
from edge_rt.bundle import Bundle
from edge_rt.cli.output import positive
from edge_rt.errors import EngineError
from edge_rt.telemetry.percentile import percentile

PAUSE_S = 0.02  # between two questions for /health
IDLE_S = 5.0
END = b"data: [DONE]\n\n"


class Stream:
    """One streamed completion on its socket."""

    def __init__(self, address: tuple[str, int], body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        self.socket = socket.create_connection(address)
        self.socket.sendall(head.encode() + content)
        self.events = 0
        self.usage: int | None = None
        self._last = b""

    def read(self) -> bool:
        """Take what has come; whether it was the last."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise EngineError(f"a stream broke off after {self.events} events: {self._last[-200:]}")
        self.events += data.count(b"data: {")
        self._last = self._last[-400:] + data
        if END not in self._last:
            return False
        used = re.search(rb'"completion_tokens":(\d+)', self._last)
        self.usage = int(used[1]) if used else None
        return True


def stream_all(address: tuple[str, int], streams: int, tokens: int) -> float:
    """Seconds that so many streams take; EngineError if one is not whole."""
    body = {
        "prompt": [1, 2, 3],
        "max_tokens": tokens,
        "stop": ["a string that never comes"],
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = time.perf_counter()
    found = [Stream(address, body) for _ in range(streams)]
    with selectors.DefaultSelector() as ready:
        for one in found:
            ready.register(one.socket, selectors.EVENT_READ, one)
        while ready.get_map():
            for key, _ in ready.select():
                if key.data.read():
                    ready.unregister(key.fileobj)
    took_s = time.perf_counter() - begun
    for one in found:
        one.socket.close()
        if (one.events, one.usage) != (tokens + 1, tokens):  # the last brings the usage
            raise EngineError(f"a stream of {tokens} tokens had {one.events} events")
    return took_s


def ask_health(address: tuple[str, int], duration_s: float) -> list[float]:
    """Milliseconds of each answer."""
    found, end = [], time.monotonic() + duration_s
    while time.monotonic() < end:
        begun = time.perf_counter()
        connection = http.client.HTTPConnection(*address, timeout=60)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        if answer.status != 200:
            raise EngineError(f"/health answered {answer.status}")
        answer.read()
        connection.close()
        found.append((time.perf_counter() - begun) * 1e3)
        time.sleep(PAUSE_S)
    return found


def percentiles(values_ms: list[float]) -> dict[str, float]:
    """Of the answers of /health."""
    return {
        "health_ms_p50": percentile(values_ms, 50),
        "health_ms_p99": percentile(values_ms, 99),
        "health_ms_max": max(values_ms),
        "health_answers": len(values_ms),
    }


def cpu_s(port: int) -> float:
    """CPU time of the process that listens at a port of this machine, as /metrics says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    connection.close()
    found = re.search(r"^process_cpu_seconds_total ([\d.e+-]+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


@contextlib.contextmanager
def health_meanwhile(address: tuple[str, int], duration_s: float) -> Iterator[Callable[[], Any]]:
    """Ask /health for so long, in another process; the value waits for its percentiles."""
    with ProcessPoolExecutor(1) as pool:
        asking = pool.submit(ask_health, address, duration_s)
        yield lambda: percentiles(asking.result())


def streams(bundle: Path, count: int, tokens: int, duration_s: float) -> dict[str, Any]:
    """Rounds of `count` streams for so long: first alone, then while /health is asked."""
    with daemon.started(bundle) as one:
        address = "127.0.0.1", one.port
        stream_all(address, count, tokens)
        with health_meanwhile(address, IDLE_S) as health:
            idle = health()
        progress("streams alone")
        served, begun = cpu_s(address[1]), time.perf_counter()
        spent_s = time.process_time()
        times = _rounds(address, count, tokens, duration_s)
        wall_s, spent_s = time.perf_counter() - begun, time.process_time() - spent_s
        served = cpu_s(address[1]) - served
        progress("streams, and /health asked")
        with health_meanwhile(address, duration_s) as health:
            asked = _rounds(address, count, tokens, duration_s)
            under = health()
    rates = [count * tokens / took_s for took_s in times]
    events = count * tokens * len(times)
    return {
        "idle": idle,
        "streams": {
            "count": count,
            "tokens_each": tokens,
            "rounds": len(times),
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_worst": min(rates),
            "tokens_per_s_best": max(rates),
            "daemon_cpu_us_per_token": served / events * 1e6,
            "daemon_cores": served / wall_s,
            "client_cpu_us_per_token": spent_s / events * 1e6,
        },
        "under_streams": under
        | {"tokens_per_s": statistics.median(count * tokens / took_s for took_s in asked)},
    }


def _rounds(address: tuple[str, int], count: int, tokens: int, duration_s: float) -> list[float]:
    found, end = [], time.monotonic() + duration_s
    while time.monotonic() < end:
        found.append(stream_all(address, count, tokens))
    return found


def prefill(bundle: Path, duration_s: float) -> dict[str, Any]:
    """/health while prompts as long as the engine takes are read all the time."""
    context = Bundle.load(bundle).manifest.limits().max_context
    body = json.dumps({"prompt": [[t] * (context - 1) for t in range(1, 9)], "max_tokens": 1})
    with daemon.started(bundle) as one, ThreadPoolExecutor(1) as pool:
        address = "127.0.0.1", one.port

        def ask() -> float:
            prompts, begun = 0, time.monotonic()
            while time.monotonic() - begun < duration_s:
                connection = http.client.HTTPConnection(*address, timeout=600)
                connection.request("POST", "/v1/completions", body)
                status = connection.getresponse().status
                connection.close()
                if status != 200:
                    raise EngineError(f"prompts of {context - 1} tokens were answered {status}")
                prompts += 8
            return prompts * (context - 1) / (time.monotonic() - begun)

        asking = pool.submit(ask)
        with health_meanwhile(address, duration_s) as health:
            found = health()
        return found | {"prompt_tokens_per_s": asking.result()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    found = streams(options.bundle, options.streams, options.tokens, options.seconds)
    if options.prefill is not None:
        progress("/health while prompts are read")
        found["under_prefill"] = prefill(options.prefill, options.seconds)
    found["load_1_min"] = os.getloadavg()[0]
    return found


def main() -> None:
    """Measure, and write one JSON object to stdout or to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, metavar="NULL_BUNDLE")
    parser.add_argument("--prefill", type=Path, metavar="CPU_BUNDLE")
    parser.add_argument("--streams", type=positive, default=8, metavar="N")
    parser.add_argument("--tokens", type=positive, default=500, metavar="N")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S")
    command.run(parser, measure)


if __name__ == "__main__":
    main()
