"""When figures are taken."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Literal

import pytest

from edge_rt.power.settings import BoardSettings
from edge_rt.serve.reporting import Reporting
from edge_rt.serve.settings import Settings
from edge_rt.serve.state import State
from edge_rt.telemetry.settings import TelemetrySettings


@pytest.mark.parametrize("kind", ["none", "auto"])
def test_who_wants_no_sensors_has_none_read(kind: Literal["none", "auto"]) -> None:
    state = State(Settings(board=BoardSettings(kind=kind)))
    reporting = Reporting(state, lambda: None)
    reporting.start()
    deadline = time.monotonic() + 5
    while kind == "auto" and state.board() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (state.board() is None) == (kind == "none")
    asyncio.run(reporting.stop())


def test_a_stall_is_one_long_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates over the moment after it would be of nothing."""
    interval_s = 0.2
    settings = Settings(telemetry=TelemetrySettings(interval_s=interval_s))
    reporting = Reporting(State(settings), lambda: None)
    ticks: list[float] = []
    monkeypatch.setattr(reporting, "_tick", lambda: ticks.append(time.monotonic()))

    async def live() -> None:
        running = asyncio.ensure_future(reporting.run())
        await asyncio.sleep(1.5 * interval_s)
        time.sleep(3 * interval_s)  # whatever holds up the loop
        await asyncio.sleep(2.5 * interval_s)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(live())
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert max(gaps) > 2.5 * interval_s
    assert min(gaps) > 0.5 * interval_s
