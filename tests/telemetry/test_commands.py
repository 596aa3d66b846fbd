"""Commands over a real mosquitto: few, live, answered."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fakes.broker import Broker, Listener, broker, listener, proxy
from fakes.broker_client import Device, device
from fakes.broker_scripted import CONNACK, scripted
from fakes.waiting import eventually

from edge_rt.telemetry.commands import MAX_PAYLOAD_BYTES, MAX_WAITING, Reply
from edge_rt.telemetry.connection import Message
from edge_rt.telemetry.delivery import MOST_WAITING, WINDOW
from edge_rt.telemetry.publisher import Duties


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    with broker(tmp_path) as found:
        yield found


@pytest.fixture
def ear(mosquitto: Broker) -> Iterator[Listener]:
    with listener(mosquitto.port) as found:
        yield found


class Desk:
    """Takes commands: answers at once, fails, or waits until it is told to go on."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []
        self.go_on = threading.Event()
        self.answer: Mapping[str, Any] | Exception | None = {"drained": 3}

    def __call__(self, verb: str, payload: dict[str, Any], reply: Reply) -> None:
        self.taken.append((verb, payload))
        if self.answer is None:
            self.go_on.wait(30)
            reply({})
        elif isinstance(self.answer, Exception):
            raise self.answer
        else:
            reply(self.answer)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def box(mosquitto: Broker, desk: Desk) -> Iterator[Device]:
    with device(
        mosquitto.port, duties=Duties(on_command=desk), commands=["drain", "bench"]
    ) as made:
        eventually(lambda: mosquitto.log().count("Sending SUBACK to edge_rt-box") == 1)
        yield made
        desk.go_on.set()


def answers(ear: Listener, count: int = 1) -> list[dict[str, Any]]:
    eventually(lambda: len(ear.on("reply/1")) >= count)
    return [heard.fields for heard in ear.on("reply/1")]


REPLY = "edge_rt/box/reply/1"


def test_command_is_answered_where_and_as_it_says(box: Device, ear: Listener, desk: Desk) -> None:
    ear.send("edge_rt/box/cmd/drain", '{"in_s":5}', response=REPLY, correlation=b"\x00c1")
    (answer,) = answers(ear)
    assert desk.taken == [("drain", {"in_s": 5})]
    assert (answer["ok"], answer["verb"], answer["drained"]) == (True, "drain", 3)
    assert ear.on("reply/1")[0].correlation == b"\x00c1"
    assert not ear.on("reply/1")[0].retain


def test_command_without_a_response_topic_is_run(box: Device, ear: Listener, desk: Desk) -> None:
    ear.send("edge_rt/box/cmd/bench")
    eventually(lambda: desk.taken == [("bench", {})])


def test_fault_of_the_handler_is_an_answer(box: Device, ear: Listener, desk: Desk) -> None:
    desk.answer = RuntimeError("no such bundle")
    ear.send("edge_rt/box/cmd/bench", response=REPLY)
    assert answers(ear)[0]["error"] == "no such bundle"
    assert answers(ear)[0]["ok"] is False
    desk.answer = {"value": object()}
    ear.send("edge_rt/box/cmd/bench", response=REPLY)
    assert answers(ear, 2)[1]["ok"] is False
    assert "JSON" in answers(ear, 2)[1]["error"]
    desk.answer = {"ok": False, "error": "not now"}
    ear.send("edge_rt/box/cmd/bench", response=REPLY)
    assert answers(ear, 3)[2]["error"] == "not now"


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("{", "not JSON"),
        ("[1]", "found list"),
        (b"\xff\xfe{}", "not JSON"),
        ("[" * 60_000, "not JSON"),
        (json.dumps({"x": "y" * MAX_PAYLOAD_BYTES}), "at most 65536"),
    ],
)
def test_bad_payload_gets_an_error(
    payload: bytes | str, error: str, box: Device, ear: Listener, desk: Desk
) -> None:
    ear.send("edge_rt/box/cmd/drain", payload, response=REPLY)
    (answer,) = answers(ear)
    assert answer["ok"] is False
    assert error in answer["error"]
    assert desk.taken == []
    assert box.status.reconnects == 0


def test_retained_command_is_never_run(
    mosquitto: Broker, ear: Listener, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """frigate#6236: neither one from before, nor a live one that would come again later."""
    ear.send("edge_rt/box/cmd/drain", '{"n":1}', retain=True)
    duties = Duties(on_command=desk)
    with device(mosquitto.port, duties=duties, commands=["drain"]) as box:
        eventually(lambda: "Sending SUBACK to edge_rt-box" in mosquitto.log())
        ear.send("edge_rt/box/cmd/drain", '{"n":2}', retain=True, response=REPLY)
        assert "retained" in answers(ear)[0]["error"]
        ear.send("edge_rt/box/cmd/drain", '{"n":3}')
        eventually(lambda: desk.taken)
        assert box.status.state == "connected"
    assert desk.taken == [("drain", {"n": 3})]
    assert caplog.text.count("it is retained") == 1


def test_commands_are_subscribed_to_again(mosquitto: Broker, ear: Listener, desk: Desk) -> None:
    """frigate#814: after a reconnection they still arrive."""
    with (
        proxy(mosquitto.port) as network,
        device(network.port, duties=Duties(on_command=desk), commands=["drain"]) as box,
    ):
        eventually(lambda: box.status.state == "connected")
        network.cut()
        eventually(lambda: box.status.state == "down")
        network.is_open = True
        eventually(lambda: mosquitto.log().count("Sending SUBACK to edge_rt-box") == 2)
        ear.send("edge_rt/box/cmd/drain", '{"after":1}')
        eventually(lambda: desk.taken == [("drain", {"after": 1})])


def test_commands_are_off_unless_allowed(mosquitto: Broker, ear: Listener, desk: Desk) -> None:
    with device(mosquitto.port, duties=Duties(on_command=desk)) as box:
        eventually(lambda: ear.on("/info"))
        ear.send("edge_rt/box/cmd/drain", response=REPLY)
        box.make(1)
        eventually(lambda: box.status.published_records == 1)
    assert "SUBSCRIBE from edge_rt-box" not in mosquitto.log()
    assert desk.taken == []
    assert ear.on("reply/1") == []


def test_unknown_or_forbidden_verb_is_not_listened_to(
    box: Device, ear: Listener, desk: Desk
) -> None:
    for verb in ("power-cap", "reboot", "drain/x", ""):
        ear.send(f"edge_rt/box/cmd/{verb}", response=REPLY)
    ear.send("edge_rt/box/cmd/drain", response=REPLY)
    assert len(answers(ear)) == 1
    assert desk.taken == [("drain", {})]


def test_one_command_at_a_time_a_few_wait_the_rest_is_told(
    box: Device, ear: Listener, desk: Desk
) -> None:
    """PAHO#328: a slow command keeps neither the connection nor records from living."""
    desk.answer = None
    ear.send("edge_rt/box/cmd/bench", response=REPLY)
    eventually(lambda: len(desk.taken) == 1)
    for _ in range(MAX_WAITING + 2):
        ear.send("edge_rt/box/cmd/bench", response=REPLY)
    busy = answers(ear, 2)
    assert [answer["ok"] for answer in busy] == [False, False]
    assert "busy" in busy[0]["error"]
    box.make(50)
    eventually(lambda: len(ear.records("telemetry")) == 50)
    desk.go_on.set()
    assert [answer["ok"] for answer in answers(ear, MAX_WAITING + 3)[2:]] == [True] * 5
    assert len(desk.taken) == MAX_WAITING + 1


@pytest.mark.parametrize(
    "topic", ["edge_rt/box/state", "edge_rt/box/cmd/drain", "edge_rt/box/telemetry", "$SYS/x"]
)
def test_answers_do_not_go_to_topics_that_mean_something_else(
    topic: str, box: Device, ear: Listener, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    ear.send("edge_rt/box/cmd/drain", response=topic)
    ear.send("edge_rt/box/cmd/drain", response=REPLY)
    answers(ear)
    assert [each for each in ear.heard if b'"ok"' in each.payload and each.topic != REPLY] == []
    assert len(desk.taken) == 2
    assert "is not answered" in caplog.text


def test_drain_waits_for_no_other_command(box: Device, ear: Listener, desk: Desk) -> None:
    desk.answer = None
    for _ in range(MAX_WAITING + 1):
        ear.send("edge_rt/box/cmd/bench")
    eventually(lambda: len(desk.taken) == 1)
    desk.answer = {"drained": 3}
    ear.send("edge_rt/box/cmd/drain", response=REPLY)
    assert answers(ear)[0]["ok"]


def test_a_flood_of_commands_does_not_hold_up_records(tmp_path: Path) -> None:
    """The broker acknowledges the answers to none of them."""
    with scripted(CONNACK) as odd, device(odd.port) as box:
        eventually(lambda: box.status.state == "connected")
        for number in range(5000):
            box.publisher._mailbox.put_message(Message("reply/1", b"%d" % number))
        eventually(lambda: odd.published >= WINDOW * 3 // 4)
        time.sleep(0.2)
        assert odd.published == WINDOW * 3 // 4
        box.make(3)
        eventually(lambda: odd.published == WINDOW * 3 // 4 + 3)
        assert len(box.publisher._worker._delivery._control) <= MOST_WAITING
