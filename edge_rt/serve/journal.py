"""One line for each request, at its end."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_rt.core import FinishReason
from edge_rt.serve.completions import Call
from edge_rt.serve.front import Ticket

logger = logging.getLogger("edge_rt.request")

ERROR_CHARACTERS = 300
GONE = 499  # as nginx has it: the client has closed the request

# journald reads a priority in front of a line: man 3 sd-daemon.
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}


class JournalFormatter(logging.Formatter):
    """Lines as journald wants them: `<6>text`, without a time, which the journal has."""

    def format(self, record: logging.LogRecord) -> str:
        """Every line of a record carries the priority."""
        priority = _PRIORITIES.get(record.levelno, 2)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


@dataclass(slots=True)
class Entry:
    """What is known of a request; `write` says it once."""

    client: str | None = None  # its address
    key: str | None = None
    status: int = 500  # until there is another: a fault of ours
    error: str | None = None  # why it was refused
    is_cached: bool = False  # whether the answer is one that was kept
    begun_ns: int = field(default_factory=time.monotonic_ns)

    def write(self, call: Call | None, tickets: Sequence[Ticket], *, prompts: bool) -> None:
        """Log the request as one line of key=value; text only where `prompts` says so."""
        if not logger.isEnabledFor(logging.INFO):
            return
        now_ns = time.monotonic_ns()
        parts: dict[str, object] = {
            "status": self.status,
            "client": self.client,
            "key": self.key,
            "cached": self.is_cached or None,
        }
        if call is not None:
            choices = [choice for ticket in tickets for choice in ticket.choices.rows]
            first_ns = min((c.first_token_ns for c in choices if c.first_token_ns), default=None)
            # What is open as its client goes is cancelled; at any other time that is a fault.
            without = FinishReason.CANCELLED.value if self.status == GONE else "open"
            ends = {c.finish.value if c.finish else without for c in choices}
            parts |= {
                "id": call.id,
                "stream": bool(call.body.stream),
                "prompt_tokens": sum(len(request.prompt) for request in call.requests),
                "completion_tokens": sum(len(choice.tokens) for choice in choices),
                "finish": ",".join(sorted(ends)) or None,
                "ttft_ms": None if first_ns is None else (first_ns - self.begun_ns) / 1e6,
            }
            if prompts:
                parts |= {
                    "prompt": json.dumps(call.body.prompt, ensure_ascii=False),
                    "text": json.dumps([choice.text for choice in choices], ensure_ascii=False),
                }
        parts["latency_ms"] = (now_ns - self.begun_ns) / 1e6
        if self.error is not None:
            parts["error"] = json.dumps(self.error[:ERROR_CHARACTERS], ensure_ascii=False)
        logger.info("%s", " ".join(f"{k}={_text(v)}" for k, v in parts.items() if v is not None))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.1f}" if isinstance(value, float) else f"{value}"
