"""Nothing is lost, little arrives twice: real mosquitto, killed, paused, refusing."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakes.broker import Broker, Listener, broker, listener, proxy
from fakes.broker_client import QUICK, Device, device
from fakes.broker_scripted import CONNACK, scripted
from fakes.waiting import eventually

from edge_rt.telemetry.backoff import Delays
from edge_rt.telemetry.delivery import WINDOW

ACCEPTING = {"replay_per_s": 1000.0}


def heard(ear: Listener, topic: str = "telemetry") -> list[dict[str, Any]]:
    return ear.records(topic)


def seqs(ear: Listener, topic: str = "telemetry") -> set[int]:
    return {fields["seq"] for fields in heard(ear, topic)}


def is_in_order(numbers: list[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(numbers))


@pytest.mark.slow
def test_broker_killed_under_load_loses_nothing(tmp_path: Path) -> None:
    """PAHO#856 and the issue: complete by (boot_id, topic, seq), the live part in order."""
    made = Broker(tmp_path)
    made.start()
    kills, count = 3, 1500
    with (
        proxy(made.port) as network,
        listener(made.port) as ear,
        device(network.port, tmp_path / "spool", spool_commit_s=0.2, replay_per_s=2000) as box,
    ):
        maker = threading.Thread(target=box.make, args=(count,), kwargs={"pause_s": 0.002})
        maker.start()
        for _ in range(kills):
            time.sleep(0.7)
            network.is_open = False  # until the listener is back, which would miss records
            made.kill()
            time.sleep(0.2)
            network.cut()
            made.start()
            eventually(lambda: not ear.is_connected)
            ear.wait()
            network.is_open = True
        maker.join()
        eventually(lambda: seqs(ear) == set(range(1, count + 1)))
        eventually(lambda: box.status.spool_records == 0)
        assert box.status.reconnects >= kills
        assert box.status.dropped_records == 0
        made_twice = len(heard(ear)) - count
    assert made_twice <= kills * WINDOW
    assert is_in_order([fields["seq"] for fields in heard(ear) if not fields["historical"]])
    assert any(fields["historical"] for fields in heard(ear))
    made.kill()


def test_duplicates_after_the_devices_crash_are_within_the_window(tmp_path: Path) -> None:
    """As after kill -9: the spool's file is what it was at its last commit."""
    with broker(tmp_path) as made:
        box = Device(1, tmp_path / "spool", spool_commit_s=0.1)  # nobody listens there
        box.make(300)
        box.publisher.start()
        eventually(lambda: box.status.spool_records == 300)
        time.sleep(0.3)
        assert box.publisher.stop()
        with listener(made.port) as ear:
            copies = tmp_path / "copies"
            copies.mkdir()
            with device(made.port, tmp_path / "spool", replay_per_s=500) as replaying:
                eventually(lambda: len(heard(ear)) > 100)
                for name in ("spool", "spool-wal"):
                    if (tmp_path / name).exists():
                        (copies / name).write_bytes((tmp_path / name).read_bytes())
                seen = {fields["seq"] for fields in heard(ear)}
                eventually(lambda: seqs(ear) == set(range(1, 301)))
                eventually(lambda: replaying.status.spool_records == 0)
            first = len(heard(ear))
            with device(made.port, copies / "spool", replay_per_s=1000) as crashed:
                eventually(lambda: crashed.status.state == "connected")
                eventually(lambda: 300 in {f["seq"] for f in heard(ear)[first:]})
                eventually(lambda: crashed.status.spool_records == 0)
            again = {fields["seq"] for fields in heard(ear)[first:]}
    assert len(seen & again) <= WINDOW
    assert seen | again == set(range(1, 301))


@pytest.mark.slow
def test_paused_broker_is_left_and_found_again(tmp_path: Path) -> None:
    """SIGSTOP for several keep-alives; PAHO#552."""
    with broker(tmp_path) as made, listener(made.port) as ear:
        with device(
            made.port, tmp_path / "spool", is_impatient=True, spool_commit_s=0.5, **ACCEPTING
        ) as box:
            eventually(lambda: box.status.state == "connected")
            box.make(10)
            eventually(lambda: len(seqs(ear)) == 10)
            made.pause()
            box.make(200, pause_s=0.02)
            eventually(lambda: box.status.state == "down", within_s=30)
            time.sleep(3)
            made.resume()
            eventually(lambda: box.status.state == "connected")
            eventually(lambda: seqs(ear) == set(range(1, 211)))
            eventually(lambda: box.status.spool_records == 0)
        assert len(heard(ear)) - 210 <= WINDOW
        assert ear.states()[-1] == "offline"


def test_replay_does_not_starve_live_records(tmp_path: Path) -> None:
    made = Broker(tmp_path)
    with device(made.port, tmp_path / "spool", spool_commit_s=0.1, replay_per_s=100) as box:
        box.make(400)
        eventually(lambda: box.status.spool_records == 400)
        made.start()
        with listener(made.port) as ear:
            eventually(lambda: box.status.state == "connected")
            begun = time.monotonic()
            box.make(40, pause_s=0.02)
            eventually(lambda: not set(range(401, 441)) - seqs(ear))
            assert box.status.spool_records > 100, "they overtook the backlog"
            eventually(lambda: seqs(ear) == set(range(1, 441)))
            assert time.monotonic() - begun >= 2.9, "the rate is kept: 400 at 100/s, 1 s at once"
        made.kill()
    live = [fields["seq"] for fields in heard(ear) if not fields["historical"]]
    assert live == list(range(401, 441))
    old = [fields["seq"] for fields in heard(ear) if fields["historical"]]
    assert old == list(range(1, 401))


@pytest.mark.parametrize(("allowed", "most"), [(1, 1), (3, 3), (None, WINDOW)])
def test_receive_maximum_is_kept(allowed: int | None, most: int) -> None:
    """paho does not keep to it, and brokers disconnect whoever goes beyond."""
    connack = CONNACK if allowed is None else bytes([0x20, 6, 0, 0, 3, 0x21, 0, allowed])
    with scripted(connack, puback_s=0.03) as made:
        box = Device(made.port, **ACCEPTING)
        box.make(30)
        box.publisher.start()
        eventually(lambda: box.status.state == "connected")
        box.make(40)
        eventually(lambda: box.status.published_records == 70)
        assert box.publisher.stop()
        assert made.most_unacknowledged == most


def test_mosquitto_with_a_receive_maximum_of_one_gets_all(tmp_path: Path) -> None:
    with broker(tmp_path, "max_inflight_messages 1") as made, listener(made.port) as ear:
        box = Device(made.port, tmp_path / "spool", **ACCEPTING)
        box.make(30)
        box.publisher.start()
        eventually(lambda: box.status.state == "connected")
        box.make(30)
        eventually(lambda: seqs(ear) == set(range(1, 61)))
        assert box.status.reconnects == 0
        assert box.publisher.stop()


@pytest.mark.parametrize("is_first", [False, True], ids=["live", "backlog"])
def test_record_beyond_the_maximum_packet_size_is_dropped_and_counted(
    tmp_path: Path, is_first: bool
) -> None:
    """mosquitto disconnects on it: sent again, it would do so for ever."""
    with broker(tmp_path, "max_packet_size 2000") as made, listener(made.port) as ear:
        box = Device(made.port, tmp_path / "spool")
        if not is_first:
            box.publisher.start()
            eventually(lambda: box.status.state == "connected")
        box.make(1)
        box.publisher.publish(box.recorder.make("telemetry", {"text": "x" * 3000}))
        box.make(1)
        if is_first:
            box.publisher.start()
        eventually(lambda: seqs(ear) == {1, 3})
        eventually(lambda: box.status.refused_records == 1)
        assert box.status.reconnects == 0
        assert box.publisher.stop()
        assert box.status.spool_records == 0


def test_packet_sizes_are_counted_to_the_byte_at_the_limit(tmp_path: Path) -> None:
    """What just fits arrives; what does not is dropped by us, not by a disconnection."""
    with broker(tmp_path, "max_packet_size 400") as made, listener(made.port) as ear:
        with device(made.port) as box:
            eventually(lambda: box.status.state == "connected")
            for length in range(150, 350):
                box.publisher.publish(box.recorder.make("telemetry", {"text": "x" * length}))
            eventually(lambda: box.status.spool_records == 0)
            eventually(lambda: box.status.refused_records + box.status.published_records == 200)
            assert box.status.reconnects == 0
            assert box.status.refused_records > 50
        longest = max(len(each.payload) for each in ear.on("/telemetry"))
    assert longest >= 400 - 13 - len("edge_rt/box/telemetry") - 1


def acl(path: Path, *denied: str) -> Path:
    path.write_text(
        "topic read #\ntopic write edge_rt/box/state\ntopic write edge_rt/box/info\n"
        + "".join(f"topic write edge_rt/box/{topic}\n" for topic in ("telemetry", "bench", "event")
                  if topic not in denied)
    )  # fmt: skip
    path.chmod(0o644)
    return path


def test_topic_that_the_acl_refuses_does_not_block_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = acl(tmp_path / "acl", "bench")
    with broker(tmp_path, f"acl_file {rules}") as made, listener(made.port) as ear:
        timing = QUICK._replace(refused=Delays(60, 60, 1.0, 1.0))
        with device(made.port, timing=timing) as box:
            eventually(lambda: box.status.state == "connected")
            for _ in range(40):
                box.make(2)
                box.make(1, "bench")
            eventually(lambda: len(seqs(ear)) == 80)
            eventually(lambda: box.status.refused_records == 40)
            eventually(lambda: box.status.spool_records == 0)
            assert box.status.state != "taken-over", "mosquitto 2.0.11 closes at each refusal"
            assert box.status.reconnects <= 3, "not for each of them"
            assert seqs(ear, "bench") == set()
    assert "messages of bench are refused: Not authorized; the broker's access list" in caplog.text
    assert "; they are dropped" in caplog.text
    assert caplog.text.count("messages of bench") == 1, "not for each of them"


def test_records_wait_while_the_acl_refuses_all_of_them(tmp_path: Path) -> None:
    rules = acl(tmp_path / "acl", "telemetry", "bench", "event")
    timing = QUICK._replace(refused=Delays(6, 6, 1.0, 1.0))
    with (
        broker(tmp_path, f"acl_file {rules}") as made,
        listener(made.port) as ear,
        device(made.port, timing=timing, **ACCEPTING) as box,
    ):
        eventually(lambda: box.status.state == "connected")
        box.make(100)
        eventually(lambda: made.log().count("rc135") == 5)
        time.sleep(1.5)
        assert made.log().count("rc135") == 5, "it backs off"
        eventually(lambda: "Not authorized" in box.status.why)
        assert box.status.spool_records == 100, "nothing is thrown away"
        assert box.status.refused_records == 0
        acl(rules)
        made.reload()
        eventually(lambda: seqs(ear) == set(range(1, 101)))
        eventually(lambda: box.status.spool_records == 0)
        eventually(lambda: not box.status.why)


def test_without_a_file_nothing_is_lost_either_while_it_runs(tmp_path: Path) -> None:
    with broker(tmp_path) as made, proxy(made.port) as network, listener(made.port) as ear:
        with device(network.port, **ACCEPTING) as box:
            eventually(lambda: box.status.state == "connected")
            box.make(100)
            network.cut()
            box.make(100)
            network.is_open = True
            eventually(lambda: seqs(ear) == set(range(1, 201)))
        assert max(Counter(f["seq"] for f in heard(ear)).values()) <= 2
