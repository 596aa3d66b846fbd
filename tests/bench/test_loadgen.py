"""The real LoadGen over the loop, on an engine that only waits."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from edge_rt.bench import loadgen, report, verdict
from edge_rt.bench.extent import Extent
from edge_rt.bench.timer import Run
from edge_rt.core import DecodeRow, FinishReason, Limits, PrefillChunk
from edge_rt.errors import EngineError, RequestError
from edge_rt.loop import Loop
from edge_rt.recipes import NullOptions
from edge_rt.runtime.base import Runner, Sampled
from edge_rt.runtime.null import NullRunner

pytestmark = pytest.mark.timeout(120)  # what hangs, hangs for ever

LIMITS = Limits(4, 4, 64, 16, 4, 64, 64, 100)
PROMPTS = [(1, 2, 3), (4, 5, 6), tuple(range(40)), (7,)]
STEP_MS = 5.0


def nothing() -> None:
    pass


def null(step_ms: float = STEP_MS) -> NullRunner:
    return NullRunner(LIMITS, NullOptions(step_ms=step_ms))


def measure(
    scenario: str,
    runner: Runner,
    logs: Path,
    extent: Extent,
    max_tokens: int = 4,
    on_end: Callable[[], None] = nothing,
) -> Run:
    loop = Loop(runner)
    end = {"logs": logs, "extent": extent, "on_end": on_end}
    try:
        if scenario == "single-stream":
            return loadgen.single_stream(loop, PROMPTS, max_tokens, expected_latency_s=2e-3, **end)
        return loadgen.offline(loop, PROMPTS, max_tokens, expected_samples_per_s=100.0, **end)
    finally:
        loop.close()


SCENARIOS = pytest.mark.parametrize("scenario", ["single-stream", "offline"])
LONG = Extent(64, duration_s=20)


def system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither Python's threads nor LoadGen's own, nor our signal handlers."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads, tasks = set(threading.enumerate()), system_threads()
    yield
    assert set(threading.enumerate()) == threads
    deadline = time.monotonic() + 10  # a joined thread has yet to leave the kernel
    while system_threads() > tasks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert system_threads() <= tasks
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def summary_ms(logs: Path, line: str) -> float:
    """A time in the summary that LoadGen writes for people."""
    text = (logs / "mlperf_log_summary.txt").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(line)} \(ns\)\s*: (\d+)$", text, re.MULTILINE)
    assert found, text
    return int(found[1]) * 1e-6


@SCENARIOS
def test_counts_and_percentiles_are_those_of_loadgens_summary(
    scenario: str, tmp_path: Path
) -> None:
    run = measure(scenario, null(), tmp_path, Extent(64))
    assert len(run.timings) == 64
    assert {len(timing.token_ns) for timing in run.timings} == {4}
    assert {timing.finish for timing in run.timings} == {FinishReason.LENGTH}
    said = verdict.read(tmp_path)
    assert said.valid
    assert said.warnings() == []
    assert said.samples == 64
    table = report.summarize(run)
    assert table["latency_ms_p50"] >= 4 * STEP_MS
    # A thread may wait for the processor between LoadGen's time and ours.
    near = partial(pytest.approx, rel=0.2, abs=0.8 * STEP_MS)
    for q in (50, 90):
        theirs = summary_ms(tmp_path, f"{q}.00 percentile latency")
        assert table[f"latency_ms_p{q}"] == near(theirs)
    if scenario == "single-stream":
        assert table["ttft_ms_p50"] == near(
            summary_ms(tmp_path, "50.00 percentile first token latency")
        )
        assert table["tpot_ms_p50"] == near(
            summary_ms(tmp_path, "50.00 percentile time to output token")
        )
    else:
        assert table["samples_per_s"] == near(said.values["result_samples_per_second"])
        assert table["throughput_tok_s"] == near(said.values["result_tokens_per_second"])


def test_single_stream_goes_on_until_the_time_has_passed(tmp_path: Path) -> None:
    run = measure("single-stream", null(1.0), tmp_path, Extent(4, duration_s=0.7))
    assert verdict.read(tmp_path).values["result_min_duration_met"]
    assert run.wall_ns >= 0.7e9
    assert len(run.timings) > 4
    for earlier, later in zip(run.timings, run.timings[1:], strict=False):
        assert earlier.ended_ns <= later.submitted_ns


def test_offline_hands_in_at_once_what_the_expected_rate_asks_for(tmp_path: Path) -> None:
    run = measure("offline", null(1.0), tmp_path, Extent(4, duration_s=0.5))
    assert len(run.timings) == 55  # 1.1 x 0.5 s x 100 a second
    assert len({timing.submitted_ns for timing in run.timings}) == 1
    assert verdict.read(tmp_path).values["requested_offline_expected_qps"] == 100


def test_loadgens_verdict_is_read_from_its_files(tmp_path: Path) -> None:
    measure("single-stream", null(1.0), tmp_path / "few", Extent(10))
    said = verdict.read(tmp_path / "few")
    assert not said.valid
    (warning,) = said.warnings()
    assert warning.startswith("LoadGen says INVALID: Only processed 10 queries. Need to process at")
    measure("offline", null(0.0), tmp_path / "short", Extent(4, duration_s=0.5))
    said = verdict.read(tmp_path / "short")
    assert not said.valid
    assert any("took less than 0.5 s. Increase expected QPS" in line for line in said.warnings())


@SCENARIOS
def test_a_single_new_token_has_no_time_per_token(scenario: str, tmp_path: Path) -> None:
    run = measure(scenario, null(1.0), tmp_path, Extent(64), max_tokens=1)
    assert {len(timing.token_ns) for timing in run.timings} == {1}
    assert verdict.read(tmp_path).valid


class Dying(NullRunner):
    """Fails at a call of one kind: in a prompt, or after the first token."""

    def __init__(self, kind: str, number: int, error: BaseException) -> None:
        super().__init__(LIMITS, NullOptions(step_ms=1.0))
        self.kind = kind
        self.left = number
        self.error = error

    def die(self, kind: str) -> None:
        self.left -= kind == self.kind
        if self.left == 0:
            raise self.error

    def prefill(self, chunks: Sequence[PrefillChunk], *, want_logits: bool = False) -> Sampled:
        self.die("prefill")
        return super().prefill(chunks, want_logits=want_logits)

    def decode(self, rows: Sequence[DecodeRow], *, want_logits: bool = False) -> Sampled:
        self.die("decode")
        return super().decode(rows, want_logits=want_logits)


CALLS = pytest.mark.parametrize(
    ("kind", "number"), [("prefill", 1), ("prefill", 5), ("decode", 1), ("decode", 5)]
)


@SCENARIOS
@CALLS
def test_a_failing_engine_ends_the_run(
    scenario: str, kind: str, number: int, tmp_path: Path
) -> None:
    dying = Dying(kind, number, EngineError("the device is lost"))
    with pytest.raises(EngineError, match=r"request .* failed: the device is lost"):
        measure(scenario, dying, tmp_path, LONG)
    # And leaves a LoadGen that works.
    assert len(measure(scenario, null(0.0), tmp_path, Extent(64)).timings) == 64


@SCENARIOS
@CALLS
def test_an_interrupt_in_the_engine_ends_the_run(
    scenario: str, kind: str, number: int, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(scenario, Dying(kind, number, KeyboardInterrupt()), tmp_path, LONG)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@SCENARIOS
def test_a_signal_ends_the_run(scenario: str, number: signal.Signals, tmp_path: Path) -> None:
    runner = Dying("decode", -1, AssertionError())  # that is: never
    decoded: list[int] = []

    def on_end() -> None:
        decoded.append(runner.left)
        if len(decoded) == 3:
            os.kill(os.getpid(), number)

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(143)

    old = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
            measure(scenario, runner, tmp_path, LONG, on_end=on_end)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert runner.left >= decoded[2] - 1  # at the most the step that was under way


@SCENARIOS
def test_a_request_that_does_not_fit_is_said_at_once(scenario: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="more than the 64 tokens of a request"):
        measure(scenario, null(), tmp_path, Extent(64), max_tokens=60)


@SCENARIOS
def test_progress_that_cannot_be_shown_is_no_endless_run(scenario: str, tmp_path: Path) -> None:
    def gone() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        measure(scenario, null(), tmp_path, LONG, on_end=gone)


def test_a_place_for_the_files_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(FileExistsError):
        measure("offline", null(), tmp_path / "file", LONG)
