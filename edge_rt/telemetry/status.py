"""How the connection to the MQTT broker fares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LinkState = Literal["off", "connecting", "connected", "auth-failed", "taken-over", "down"]


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """`down` waits to try again, and `why` says what failed last.

    Records: those of the spool that no broker has acknowledged yet, and since the spool's file was
    made, or the daemon started if it has none: those that were dropped, `dropped_before` of them in
    earlier runs. `spool_fault` says why
    records are kept in memory alone. `refused_records` were dropped since the daemon started, for a
    topic, size or content that the broker does not take.
    """

    state: LinkState = "off"
    why: str = ""
    spool_records: int = 0
    spool_bytes: int = 0
    dropped_records: int = 0
    published_records: int = 0
    reconnects: int = 0
    spool_fault: str = ""
    refused_records: int = 0
    dropped_before: int = 0
