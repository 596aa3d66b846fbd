"""Two threads: everything arrives, in order, and neither waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time

from edge_rt.serve import handover
from edge_rt.serve.handover import Handover


def test_everything_arrives_in_order() -> None:
    async def run() -> None:
        found: list[int] = []
        handed: Handover[int] = Handover(found.extend)

        def put() -> None:
            for first in range(0, 20_000, 4):
                handed.put([first, first + 1, first + 2, first + 3])
                if first % 400 == 0:  # now and then nothing is due when the next comes
                    time.sleep(3 * handover.EVERY_S)

        await asyncio.to_thread(put)
        deadline = time.monotonic() + 20
        while len(found) < 20_000:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert found == list(range(20_000))

    asyncio.run(run())


def test_short_steps_do_not_wake_the_other_thread_each() -> None:
    async def run() -> None:
        deliveries: list[int] = []
        handed: Handover[int] = Handover(lambda items: deliveries.append(len(items)))
        await asyncio.to_thread(lambda: [handed.put([1]) for _ in range(5000)])
        await asyncio.sleep(0.1)
        assert sum(deliveries) == 5000
        assert len(deliveries) < 2500

    asyncio.run(run())


def test_a_delivery_that_fails_is_one_only() -> None:
    async def run() -> None:
        found: list[int] = []

        def deliver(items: list[int]) -> None:
            if not found:
                found.append(0)
                raise ValueError
            found.extend(items)

        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        handed: Handover[int] = Handover(deliver)
        for item in range(3):
            await asyncio.to_thread(handed.put, [item])
            await asyncio.sleep(0.05)
        assert found == [0, 1, 2]

    asyncio.run(run())


def test_a_thread_that_stands_still_holds_the_other_up_for_a_moment_only() -> None:
    async def run() -> None:
        found: list[int] = []
        handed: Handover[int] = Handover(found.extend)
        took_s: list[float] = []

        def put() -> None:
            time.sleep(0.1)  # asyncio's thread stands still by now
            for item in range(3):
                begun = time.monotonic()
                handed.put([item])
                took_s.append(time.monotonic() - begun)

        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(1.0)
        assert len(took_s) == 3
        assert max(took_s) < 10 * handover.PATIENCE_S
        assert max(took_s) > handover.PATIENCE_S / 2  # it did wait
        await asyncio.sleep(0.1)
        assert found == [0, 1, 2]

    asyncio.run(run())
