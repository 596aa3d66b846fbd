"""The real LoadGen's Server scenario at a daemon."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from fakes.bundles import slow_bundle
from serve.conftest import started

from edge_rt.bench import loadgen_server, report, verdict
from edge_rt.bench.loadgen_server import Job, due_ns
from edge_rt.errors import EngineError
from edge_rt.telemetry.percentile import percentile

pytestmark = pytest.mark.timeout(300)

STEP_MS = 10
PROMPTS = ["def read_file(path", "import os", "The"]


@pytest.fixture(scope="module")
def slow(demo_quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("slow")
    return slow_bundle(demo_quantized, directory, max_batch=4, step_ms=STEP_MS)


def job(url: str, logs: Path, samples: int, rate_per_s: float, max_tokens: int = 4) -> Job:
    return Job(url, None, PROMPTS, max_tokens, rate_per_s, samples, 0.0, str(logs))


def test_counts_and_times_are_loadgens(slow: Path, tmp_path: Path) -> None:
    ended: list[None] = []
    with started(slow) as daemon:
        outcome = loadgen_server.measure(
            job(daemon.url, tmp_path, 64, 20.0), lambda: ended.append(None)
        )
        single = loadgen_server.measure(job(daemon.url, tmp_path / "1", 8, 40.0, 1), ended.clear)
    timings = outcome.run.timings
    assert len(timings) == len(ended) + 64 == 64  # `ended` was cleared by the second run
    assert {len(timing.token_ns) for timing in timings} == {4}
    assert {len(timing.token_ns) for timing in single.run.timings} == {1}
    assert outcome.prompt_tokens > 64
    said = verdict.read(tmp_path)
    assert said.samples == 64
    assert "result_completed_samples_per_sec" in said.values
    # A thread may wait for the processor between LoadGen's time and ours.
    for q in (50, 90):
        for what, values in (
            ("", report.latency_ms(outcome.run)),
            ("first_token_", report.ttft_ms(outcome.run)),
        ):
            theirs = said.values[f"result_{what}{q}.00_percentile_latency_ns"] * 1e-6
            ours = percentile(values, q)
            assert ours == pytest.approx(theirs, rel=0.2, abs=0.8 * STEP_MS)
    assert not (tmp_path / loadgen_server.TRACE).exists()


def test_when_queries_were_due_is_read_from_the_trace() -> None:
    def line(seq: int, at_us: float, delay_ns: int) -> str:
        return (
            f'{{"name":"Sample","cat":"default","ph":"b","pid":1,"id":{seq},"ts":{at_us},'
            f'"args":{{"sample_seq":{seq},"query_seq":{seq},"sample_idx":9,'
            f'"issue_start_ns":{delay_ns},"complete_ns":99}}}},\n'
        )

    # Issued after 5 and 7 us, and with us 3 and 100 us later; ours began at 10_000.
    lines = line(1, 2000.5, 7000), line(0, 1000.0, 5000)
    issued = [10_000 + 1_000_000 + 5000 + 3000, 10_000 + 2_000_500 + 7000 + 100_000]
    expected = [10_000 + 3000 + 1_000_000, 10_000 + 3000 + 2_000_500]
    assert due_ns('{"name":"Other","ts":1},\n' + "".join(lines), issued) == expected
    for trace, told in ((lines[0], 1), ("", 0)):
        with pytest.raises(EngineError, match=f"tells of {told} of 2 queries .*--timer own"):
            due_ns(trace, issued)


def test_a_refused_query_ends_it(slow: Path, tmp_path: Path) -> None:
    config = tmp_path / "edge-rt.toml"
    config.write_text("[server]\nmax_queue = 1\n")
    with started(slow, "--config", str(config)) as daemon:
        one = job(daemon.url, tmp_path / "logs", 100_000, 100.0, 40)
        with pytest.raises(EngineError, match=r"429.*LoadGen knows answers only.*--rate"):
            loadgen_server.measure(one, lambda: None)


def test_a_daemon_that_dies_ends_it(slow: Path, tmp_path: Path) -> None:
    with started(slow) as daemon:
        killer = threading.Timer(4, daemon.process.kill)
        killer.start()
        begun = time.monotonic()
        with pytest.raises(EngineError, match=r"broke|no daemon answers"):
            loadgen_server.measure(job(daemon.url, tmp_path, 100_000, 5.0, 40), lambda: None)
        assert time.monotonic() - begun < 60
        killer.join()
