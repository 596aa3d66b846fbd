"""The daemon's log against what its clients saw: every request once, and with the same end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from soak_clients import Seen


@dataclass
class Ledger:
    """A daemon's log: its lines of requests, and what it warned of."""

    requests: list[dict[str, str]] = field(default_factory=list)
    warnings: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Ledger:
        """Lines that are no log lines belong to a traceback or to a crash."""
        ledger = cls()
        for line in text.splitlines():
            level, _, message = line.partition(" ")[2].partition(" ")[2].partition(" ")
            name, _, message = message.partition(": ")
            if not re.match(r"\d{4}-\d\d-\d\d ", line) or level in {"ERROR", "CRITICAL"}:
                ledger.errors.append(line)
            elif level == "WARNING":
                ledger.warnings[message] += 1
            elif name == "edge_rt.request":
                parts, _, _ = message.partition(" error=")
                ledger.requests.append(dict(part.split("=", 1) for part in parts.split(" ")))
        return ledger

    def faults(self, seen: Seen) -> Iterator[str]:
        """Where the log and the clients disagree."""
        yield from (f"the daemon logged: {line}" for line in self.errors[:20])
        logged = Counter(int(line["status"]) for line in self.requests)
        expected = sum(seen.statuses.values()) + seen.left
        if len(self.requests) != expected:
            yield f"{expected} requests were sent, {len(self.requests)} are in the log"
        for status in sorted(logged | seen.statuses):
            if status >= 500 or status not in {200, 400, 404, 422, 429, 499}:
                yield f"status {status}: {logged[status]} in the log"
            # What has left may have got any status; 499 only that.
            if logged[status] < seen.statuses[status]:
                yield f"{seen.statuses[status]} clients saw {status}, the log has {logged[status]}"
        ids = Counter(line["id"] for line in self.requests if "id" in line)
        yield from (f"{one} is {count} times in the log" for one, count in ids.items() if count > 1)
        yield from (f"{one} is not in the log" for one in seen.left_ids if one not in ids)
        by_id = {line["id"]: line for line in self.requests if "id" in line}
        for one, stream, usage in seen.answers:
            line = by_id.get(one, {})
            found = tuple(line.get(k) for k in ("status", "stream", *list(usage)[:2]))
            told = ("200", str(stream).lower(), *(str(usage[k]) for k in list(usage)[:2]))
            if found != told:
                yield f"{one} was {told} to its client and {found} in the log"
            if "open" in line.get("finish", "open"):
                yield f"{one} has no end in the log: {line}"
