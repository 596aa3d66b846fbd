"""Snapshots: each figure by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fakes.choices import choice

from edge_rt.core import BoardInfo, BoardReading, FinishReason, Limits, Load, Request, StepStats
from edge_rt.telemetry.metrics import ENDED, Metrics
from edge_rt.telemetry.snapshot import Snapshots
from edge_rt.telemetry.sources import Sources
from edge_rt.telemetry.status import LinkStatus

LIMITS = Limits(8, 32, 512, 128, 16, 64, 1024, 3072)
MS, SECOND = 1_000_000, 1_000_000_000
INFO = BoardInfo("jetson")


@dataclass
class Machine:
    """A daemon at a time that the test sets."""

    now_ns: int = 0
    engine: tuple[Limits, Load] | None = (LIMITS, Load(3, 2, 12, 5))
    reading: BoardReading | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def snapshots(self) -> Snapshots:
        sources = Sources(
            self.metrics,
            "demo",
            ("ready",),
            lambda: "ready",
            engine=lambda: self.engine,
            board=lambda: None if self.reading is None else (INFO, self.reading),
            link=lambda: LinkStatus("down", "refused", 7, 4096, dropped_records=2, reconnects=3),
        )
        return Snapshots(sources, lambda: self.now_ns)


def test_rates_are_of_the_time_between_two_snapshots() -> None:
    machine = Machine()
    snapshots = machine.snapshots()
    machine.metrics.on_step(StepStats(0, 100, 0, 30 * MS, 0, sampled_tokens=1))
    machine.now_ns = 1 * SECOND
    snapshots.take()
    machine.metrics.on_step(StepStats(0, 60, 2, 300 * MS, 100 * MS, sampled_tokens=3))
    machine.metrics.on_step(StepStats(0, 0, 3, 0, 200 * MS, sampled_tokens=3))
    machine.now_ns = 5 * SECOND
    found = snapshots.take()
    assert found["uptime_s"] == 5
    assert found["interval_s"] == 4
    assert found["prompt_tok_s"] == 15
    assert found["generation_tok_s"] == 1.5
    assert found["prompt_tokens_total"] == 160
    assert found["generation_tokens_total"] == 7
    assert found["decode_rows_mean"] == 2.5
    assert found["batch_occupancy"] == round(2.5 / 32, 4)
    assert found["engine_busy"] == 0.15
    assert found["kv_cache_usage"] == 0.75
    assert (found["requests_running"], found["requests_waiting"]) == (2, 3)
    assert found["preemptions_total"] == 5
    assert found["spool_records"] == 7
    assert found["dropped_records_total"] == 2
    assert found["mqtt_reconnects_total"] == 3
    assert found["memory_process_bytes"] > 2**20


def test_percentiles_are_of_the_requests_that_ended_in_between() -> None:
    machine = Machine()
    snapshots = machine.snapshots()
    end(machine.metrics, first_ms=1000, last_ms=9000)
    machine.now_ns = SECOND
    snapshots.take()
    for number in range(1, 101):  # latencies of 11 to 110 ms, and 1 at their end
        end(machine.metrics, first_ms=number, last_ms=number + 9)
    machine.now_ns = 11 * SECOND
    found = snapshots.take()
    assert found["requests_per_s"] == 10
    assert found["requests_finished_total"] == 101
    assert found["sequences_length_total"] == 101
    assert [found[f"ttft_ms_p{p}"] for p in (50, 90, 99)] == [51, 91, 100]
    assert [found[f"latency_ms_p{p}"] for p in (50, 90, 99)] == [61, 101, 110]
    assert found["tpot_ms_p50"] == 9
    assert found["queue_ms_p99"] == 0.5
    machine.now_ns = 12 * SECOND
    found = snapshots.take()
    assert not [name for name in found if "_ms_p" in name]
    assert found["requests_per_s"] == 0


def end(metrics: Metrics, first_ms: int, last_ms: int) -> None:
    row = choice([first_ms * MS, last_ms * MS], FinishReason.LENGTH)
    metrics.on_end(Request("r", (1,)), [row], 0, MS // 2)


def test_more_requests_than_are_kept_lose_the_first() -> None:
    machine = Machine()
    snapshots = machine.snapshots()
    for number in range(3 * ENDED):
        end(machine.metrics, first_ms=1 if number < 2 * ENDED else 5, last_ms=6)
    machine.now_ns = SECOND
    found = snapshots.take()
    assert found["ttft_ms_p50"] == 5
    assert found["requests_finished_total"] == 3 * ENDED


def test_what_is_not_known_is_not_there() -> None:
    machine = Machine(engine=None)
    snapshots = machine.snapshots()
    found = snapshots.take()  # in the same nanosecond
    for name in ("requests_running", "generation_tok_s", "decode_rows_mean", "power_mw", "lost"):
        assert name not in found
    machine.engine, machine.reading = (LIMITS, Load(0, 0, 0, 0)), BoardReading(0)
    assert "generation_tok_s" not in snapshots.take()


def test_energy_is_of_the_interval() -> None:
    machine = Machine()
    snapshots = machine.snapshots()
    reading = BoardReading(0, 30_000.04, {"VDD_GPU_SOC": 20_000.0}, energy_j=100, metered_s=5)
    machine.reading, machine.now_ns = reading, 10 * SECOND
    found = snapshots.take()
    assert found["power_mw"] == 30_000
    assert found["rail_vdd_gpu_soc_mw"] == 20_000
    assert found["energy_j_total"] == 100
    assert "power_mw_mean" not in found  # the interval's beginning was not seen
    machine.metrics.on_step(StepStats(0, 0, 8, 0, MS, sampled_tokens=8))
    machine.reading = replace(reading, energy_j=380, metered_s=15)
    machine.now_ns = 20 * SECOND
    found = snapshots.take()
    assert found["power_mw_mean"] == 28_000
    assert found["energy_j_per_tok"] == 35


def test_energy_of_half_an_interval_is_nobodys() -> None:
    machine = Machine(reading=BoardReading(0, energy_j=0, metered_s=0))
    snapshots = machine.snapshots()
    machine.now_ns = SECOND
    snapshots.take()
    machine.metrics.on_step(StepStats(0, 0, 8, 0, MS, sampled_tokens=8))
    machine.reading, machine.now_ns = BoardReading(0, energy_j=100, metered_s=5), 11 * SECOND
    found = snapshots.take()
    assert found["power_mw_mean"] == 20_000
    assert "energy_j_per_tok" not in found
    machine.reading, machine.now_ns = BoardReading(0), 21 * SECOND  # lost
    assert "power_mw_mean" not in snapshots.take()
    machine.reading, machine.now_ns = BoardReading(0, energy_j=900, metered_s=9), 31 * SECOND
    assert "power_mw_mean" not in snapshots.take()  # 800 J of who knows when


def test_labels_become_keys() -> None:
    reading = BoardReading(
        0,
        temperatures_c={"tj-thermal": 51.25},
        clocks_hz={"gpu": 1.3005e9},
        loads={"gpu": 0.4321987},
        fans_rpm={"pwm-fan": 1200},
        throttles={"OC3": 2},
        memory_available_bytes=123,
        power_mode="MAXN",
        lost={"emc": "permission denied", "VDD_CPU_CV": "input/output error"},
    )
    found = Machine(reading=reading).snapshots().take()
    assert found["temperature_tj_thermal_c"] == 51.25
    assert found["clock_gpu_hz"] == 1_300_500_000
    assert found["load_gpu"] == 0.4322
    assert found["fan_pwm_fan_rpm"] == 1200
    assert found["throttle_oc3_total"] == 2
    assert found["memory_available_bytes"] == 123
    assert found["power_mode"] == "MAXN"
    assert found["lost"] == "VDD_CPU_CV,emc"
    assert "memory_total_bytes" not in found
