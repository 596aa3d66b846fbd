"""The loop in a thread of its own, and clients in others."""

from __future__ import annotations

import threading
import time

from fakes.loops import LIMITS, Reader, Script, request

from edge_rt.core import FinishReason, TokenEvent
from edge_rt.loop import Loop
from edge_rt.sched.queue import SchedulerOptions
from edge_rt.sched.scheduler import Scheduler


def test_run_serves_from_another_thread_and_waits_when_idle() -> None:
    loop, reader, ended = Loop(Script()), Reader(), threading.Event()

    def until_end(event: TokenEvent) -> None:
        reader(event)
        if event.is_last:
            ended.set()

    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for name in ("a", "b"):
        used_s = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - used_s < 0.25, "an idle loop is at work"
        ended.clear()
        loop.submit(request(name), until_end)
        assert ended.wait(10)
    loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert reader.ends() == {"a": [FinishReason.LENGTH], "b": [FinishReason.LENGTH]}


def test_run_wakes_when_the_batching_window_closes() -> None:
    scheduler = Scheduler(LIMITS, SchedulerOptions(batching_window_ms=30))
    loop, ended = Loop(Script(), scheduler), threading.Event()
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    started = time.monotonic()
    loop.submit(request("a"), lambda event: ended.set() if event.is_last else None)
    assert ended.wait(10)
    assert time.monotonic() - started >= 0.03
    loop.stop()
    thread.join(10)


def test_requests_from_many_threads_all_end_once() -> None:
    loop, reader = Loop(Script()), Reader()

    def client(number: int) -> None:
        for count in range(25):
            loop.submit(request(f"{number}-{count}", max_tokens=1 + count % 4), reader)
            if count % 5 == 0:
                loop.cancel(f"{number}-{count}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for one in clients:
        one.start()
    while any(one.is_alive() for one in clients):
        loop.step()
    loop.run_until_idle()
    assert len(reader.events) == 100
    assert all(len(ends) == 1 for ends in reader.ends().values())
