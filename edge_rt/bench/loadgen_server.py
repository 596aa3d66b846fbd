"""MLPerf's LoadGen in its Server scenario, at a running daemon, in a process of its own.

LoadGen cannot be stopped before its schedule has ended: an interrupt, or a request that fails, ends
the process instead. Nor could LoadGen run again where a thread has ended that it has known, as the
thread in which it issues does here (bench/loadgen.py says more).

LoadGen counts latency from the moment at which a query was due, and only its trace says when that
was. So the trace is read, and our timings count from there too: no delay on the way is lost.

The process reads a Job as JSON and writes lines of JSON: `null` for each request that ends, and at
the end an object, of the outcome or of an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_rt.bench import loadgen
from edge_rt.bench.client import Address, Client, Refused
from edge_rt.bench.extent import Extent
from edge_rt.bench.server import Outcome, wall_ns
from edge_rt.bench.timer import OnEnd, Run, Timing
from edge_rt.core import FinishReason
from edge_rt.errors import EngineError

# 99 % of all requests are to keep to these: MLPerf's limits of Llama 2 70B's Server scenario.
TTFT_LIMIT_MS, TPOT_LIMIT_MS = 2000, 200
LATENCY_LIMIT_MS = 20_000  # of a whole answer: GPT-J's, taken where answers are of one token
_NS = 1_000_000

TRACE = "mlperf_log_trace.json"
# ts in microseconds is when the query was due; then it was issued after issue_start_ns.
_SAMPLE = re.compile(
    r'^{"name":"Sample",.*"ts":([\d.]+),"args":{"sample_seq":(\d+),.*"issue_start_ns":(\d+),',
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the process is to do."""

    url: str
    api_key: str | None
    prompts: Sequence[str]
    max_tokens: int
    rate_per_s: float
    samples: int
    duration_s: float
    logs: str


def measure(job: Job, on_end: OnEnd) -> Outcome:
    """Run the process; LoadGen writes its files to `job.logs`.

    EngineError if a request fails, and a refused one has: LoadGen knows answers only.
    """
    Path(job.logs).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(  # noqa: S603 - ourselves
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the caller's, who ends it
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            json.dump(asdict(job), process.stdin)
            process.stdin.close()
            said: dict[str, Any] | None = None
            for line in process.stdout:
                said = json.loads(line)
                if said is None:
                    on_end()
        finally:
            process.kill()
    if said is None:
        raise EngineError(f"LoadGen's process has ended; it says why on stderr, or in {job.logs}")
    if "error" in said:
        raise EngineError(said["error"])
    timings = tuple(
        Timing(f"loadgen-{index}", submitted, tokens, ended, FinishReason.LENGTH)
        for index, (submitted, tokens, ended) in enumerate(said["timings"])
    )
    return Outcome(Run(timings, wall_ns(timings)), said["prompt_tokens"])


class _Traffic:
    """LoadGen's samples on their way to the daemon; all but `issue` in the asyncio thread."""

    def __init__(self, lg: ModuleType, job: Job, client: Client) -> None:
        self.timings: list[Timing] = []
        self.prompt_tokens = 0
        self._lg, self._job, self._client = lg, job, client
        self._aio = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def issue(self, queries: Sequence[Any]) -> None:
        """Send LoadGen's queries on their way; in its thread."""
        now_ns = time.monotonic_ns()
        for query in queries:
            self._aio.call_soon_threadsafe(self._begin, query.id, query.index, now_ns)

    def _begin(self, number: int, index: int, now_ns: int) -> None:
        timing = Timing(f"loadgen-{len(self.timings)}", now_ns, on_end=_say_end)
        self.timings.append(timing)
        task = asyncio.ensure_future(self._answer(number, self._job.prompts[index], timing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, prompt: str, timing: Timing) -> None:
        lg, max_tokens = self._lg, self._job.max_tokens

        def on_first() -> None:
            if max_tokens > 1:
                lg.FirstTokenComplete([lg.QuerySampleResponse(number, 0, 0, 1)])

        try:
            counted = await self._client.complete(prompt, max_tokens, timing, on_first)
            self.prompt_tokens += counted
            if len(timing.token_ns) < min(2, max_tokens):
                raise EngineError(f"request {timing.request_id} got one token: no time per token")
        except Refused as error:
            hint = "LoadGen knows answers only: offer less by --rate, or take --timer own"
            _end({"error": f"{error}; {hint}"}, 1)
        except BaseException as error:
            _end({"error": str(error) or repr(error)}, 1)
        tokens = len(timing.token_ns)
        lg.QuerySamplesComplete([lg.QuerySampleResponse(number, 0, 0, tokens)])


async def _run(job: Job) -> dict[str, Any]:
    lg = loadgen.library()
    settings = loadgen.common_settings(lg, Extent(job.samples, job.duration_s), job.max_tokens)
    settings.scenario = lg.TestScenario.Server
    settings.server_target_qps = job.rate_per_s
    settings.server_target_latency_ns = LATENCY_LIMIT_MS * _NS
    settings.ttft_latency, settings.tpot_latency = TTFT_LIMIT_MS * _NS, TPOT_LIMIT_MS * _NS
    logs, count = Path(job.logs), len(job.prompts)
    async with Client(Address.parse(job.url), job.api_key) as client:
        traffic = _Traffic(lg, job, client)
        start = partial(loadgen.start_test, lg, traffic.issue, count, settings, logs, trace=True)
        await asyncio.to_thread(start)
    if not traffic.timings:
        raise EngineError(f"LoadGen issued no query; it says why on stderr, or in {logs}")
    trace = logs / TRACE
    due = due_ns(
        trace.read_text(encoding="utf-8", errors="replace"),
        [timing.submitted_ns for timing in traffic.timings],
    )
    trace.unlink()  # 3 kB a query
    for timing, at_ns in zip(traffic.timings, due, strict=True):
        timing.submitted_ns = at_ns
    return {
        "timings": [(t.submitted_ns, t.token_ns, t.ended_ns) for t in traffic.timings],
        "prompt_tokens": traffic.prompt_tokens,
    }


def due_ns(trace: str, issued_ns: Sequence[int]) -> list[int]:
    """When each query was due, by our clock; `issued_ns` is when its issue has reached us.

    LoadGen's clock is put beside ours by the query that came with the least delay. EngineError if
    the trace does not tell of all queries, as of a LoadGen that writes another one.
    """
    found = {
        int(seq): (round(float(at_us) * 1e3), int(delay_ns))
        for at_us, seq, delay_ns in _SAMPLE.findall(trace)
    }
    if found.keys() != set(range(len(issued_ns))):
        raise EngineError(
            f"LoadGen's trace tells of {len(found)} of {len(issued_ns)} queries when they were "
            f"due; take --timer own"
        )
    zero_ns = min(at - sum(found[seq]) for seq, at in enumerate(issued_ns))
    return [zero_ns + found[seq][0] for seq in range(len(issued_ns))]


def _say_end() -> None:
    print("null", flush=True)  # noqa: T201 - to the process that has started this one


def _end(said: dict[str, Any], code: int) -> None:
    try:
        print(json.dumps(said), flush=True)  # noqa: T201
    finally:
        os._exit(code)


if __name__ == "__main__":
    try:
        _end(asyncio.run(_run(Job(**json.load(sys.stdin)))), 0)
    except Exception as failure:
        _end({"error": str(failure)}, 1)
