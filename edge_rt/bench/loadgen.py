"""The real MLPerf LoadGen (package mlcommons-loadgen) over the loop, in performance mode.

LoadGen runs in the caller's thread and calls `issue` there, which steps the loop until LoadGen's
samples are answered: an engine belongs to one thread, and no other thread delays a time. Two things
would bring down LoadGen, and the process with it, so they are kept from it:
- an exception through its callbacks. What happens there is raised when LoadGen has come to its end.
- a sample that is not completed, or twice, or before its first token where those are timed.

A process calls this from one thread that lives on: LoadGen's log keeps a pointer to each thread
that has written to it (TlsLogger), and its next run follows that of a thread which has ended.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_rt.bench.extent import Extent
from edge_rt.bench.signals import signals_held
from edge_rt.bench.timer import OnEnd, Prompt, Run, Timing, request
from edge_rt.core import FinishReason, TokenEvent
from edge_rt.errors import EngineError, MissingLibraryError
from edge_rt.loop import Loop

Issue = Callable[[Sequence[Any]], None]


def library() -> ModuleType:
    """LoadGen's module; MissingLibraryError if it is not there or cannot be loaded."""
    try:
        import mlperf_loadgen
    except ImportError as error:
        raise MissingLibraryError("mlcommons-loadgen", "bench") from error
    found: ModuleType = mlperf_loadgen
    return found


def single_stream(
    loop: Loop,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    extent: Extent,
    expected_latency_s: float,
    logs: Path,
    on_end: OnEnd,
) -> Run:
    """One request at a time, of `prompts` drawn at random; LoadGen writes its files to `logs`.

    LoadGen prepares queries for twice the least duration at `expected_latency_s`. EngineError if a
    request fails, OSError if the files cannot be written.
    """
    lg = library()
    settings = common_settings(lg, extent, max_tokens)
    settings.scenario = lg.TestScenario.SingleStream
    settings.single_stream_expected_latency_ns = max(1, round(expected_latency_s * 1e9))
    traffic = _Traffic(lg, loop, prompts, max_tokens, on_end)
    traffic.times_first_tokens = max_tokens > 1
    return _run(traffic, settings, logs)


def offline(
    loop: Loop,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    extent: Extent,
    expected_samples_per_s: float,
    logs: Path,
    on_end: OnEnd,
) -> Run:
    """All requests at once, as many as `expected_samples_per_s` asks for; else as single_stream."""
    lg = library()
    settings = common_settings(lg, extent, max_tokens)
    settings.scenario = lg.TestScenario.Offline
    settings.offline_expected_qps = expected_samples_per_s
    return _run(_Traffic(lg, loop, prompts, max_tokens, on_end), settings, logs)


def common_settings(lg: ModuleType, extent: Extent, max_tokens: int) -> Any:
    """What all scenarios have."""
    settings = lg.TestSettings()
    settings.mode = lg.TestMode.PerformanceOnly
    settings.min_query_count = extent.samples
    settings.min_duration_ms = round(extent.duration_s * 1e3)
    # LoadGen divides by the number of tokens after the first.
    settings.use_token_latencies = max_tokens > 1
    return settings


class _Traffic:
    """LoadGen's samples on their way through the loop."""

    def __init__(
        self,
        lg: ModuleType,
        loop: Loop,
        prompts: Sequence[Prompt],
        max_tokens: int,
        on_end: OnEnd,
    ) -> None:
        self.lg = lg
        self.prompts = prompts
        self.timings: list[Timing] = []
        self.left = 0  # samples that are not answered yet
        self.failure: BaseException | None = None
        self.is_over = False
        self.times_first_tokens = False  # whether LoadGen does
        self._loop = loop
        self._max_tokens = max_tokens
        self._on_end = on_end

    def issue(self, queries: Sequence[Any]) -> None:
        """Answer LoadGen's queries, or complete them with nothing once it is over; never raises."""
        now_ns = time.monotonic_ns()
        samples = [_Sample(self, query) for query in queries]
        try:
            if not self.is_over:
                self._answer(samples, now_ns)
        except BaseException as error:  # before what the requests' ends have said of it
            self.failure, self.is_over = error, True
        for sample in samples:
            sample.complete()

    def _answer(self, samples: Sequence[_Sample], now_ns: int) -> None:
        self.left = len(samples)
        for sample in samples:
            timing = Timing(f"loadgen-{len(self.timings)}", now_ns, on_end=self._on_end)
            self.timings.append(timing)
            sample.timing = timing
            prompt = self.prompts[sample.index]
            self._loop.submit(request(timing.request_id, prompt, self._max_tokens), sample.on_event)
        while self.left and not self.is_over:
            self._loop.step()

    def fail(self, error: Exception) -> None:
        """Bring the run to its end for this reason, unless there is one already."""
        self.failure = self.failure or error
        self.is_over = True

    def stop(self) -> None:
        """Bring the run to its end after the step that it is in."""
        self.is_over = True


class _Sample:
    """One of LoadGen's samples, and the request that answers it."""

    def __init__(self, traffic: _Traffic, query: Any) -> None:
        self.timing: Timing | None = None
        self.index: int = query.index  # of its prompt
        self._number: int = query.id  # LoadGen's
        self._traffic = traffic
        self._lacks_first = traffic.times_first_tokens
        self._is_open = True
        self._tokens = array("i")

    def on_event(self, event: TokenEvent) -> None:
        """Take one of the loop's events."""
        try:
            self._take(event)
        except Exception as error:  # the loop would go on without this reader, and for ever
            self._traffic.fail(error)

    def _take(self, event: TokenEvent) -> None:
        assert self.timing is not None
        self.timing.on_event(event)
        if event.token is not None:
            self._tokens.append(event.token.id)
            self._say_first()
        if event.is_last:
            self._traffic.left -= 1
            if event.finish is FinishReason.LENGTH:
                self.complete()
            else:  # half an answer is no measurement
                name = self.timing.request_id
                self._traffic.fail(EngineError(f"request {name} failed: {event.message}"))

    def complete(self) -> None:
        """Tell LoadGen, which does not know yet, that it is done."""
        if self._is_open:
            self._say_first()
            self._is_open = False
            # A token count below 2 is an error to LoadGen; only a sample that failed has one.
            self._traffic.lg.QuerySamplesComplete([self._response(max(2, len(self._tokens)))])

    def _say_first(self) -> None:
        if self._lacks_first:
            self._lacks_first = False
            self._traffic.lg.FirstTokenComplete([self._response(1)])

    def _response(self, tokens: int) -> Any:
        address, count = self._tokens.buffer_info()
        size_bytes = count * self._tokens.itemsize
        return self._traffic.lg.QuerySampleResponse(self._number, address, size_bytes, tokens)


def _run(traffic: _Traffic, settings: Any, logs: Path) -> Run:
    logs.mkdir(parents=True, exist_ok=True)  # else LoadGen has one line for stderr and no result
    with signals_held(traffic.stop):
        start_test(traffic.lg, traffic.issue, len(traffic.prompts), settings, logs)
    if traffic.failure is not None:
        raise traffic.failure
    timings = traffic.timings
    if not timings:
        raise EngineError(f"LoadGen issued no query; it says why on stderr, or in {logs}")
    wall_ns = max(timing.ended_ns for timing in timings) - timings[0].submitted_ns
    return Run(tuple(timings), wall_ns)


def start_test(
    lg: ModuleType, issue: Issue, count: int, settings: Any, logs: Path, *, trace: bool = False
) -> None:
    """From the first query of `count` prompts to LoadGen's files, a trace of it all among them."""
    output = lg.LogOutputSettings()
    output.outdir = str(logs)
    output.copy_summary_to_stdout = False
    log_settings = lg.LogSettings()
    log_settings.log_output = output
    log_settings.enable_trace = trace
    sut = lg.ConstructSUT(issue, _ignore)
    qsl = lg.ConstructQSL(count, count, _ignore, _ignore)
    try:
        lg.StartTestWithLogSettings(sut, qsl, settings, log_settings)
    finally:
        lg.DestroyQSL(qsl)
        lg.DestroySUT(sut)


def _ignore(*_arguments: Any) -> None:
    """LoadGen flushes, and loads and unloads samples: the prompts are in memory anyway."""
