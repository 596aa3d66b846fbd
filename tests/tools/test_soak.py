"""The soak's books: they balance for a daemon that keeps its word, and show each way not to."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BundleFactory = Callable[[str], Path]
Tool = Callable[[str], ModuleType]

USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
LOG = """\
2026-01-01 00:00:00,000 INFO edge_rt.serve.daemon: ready: b at http://127.0.0.1:1
2026-01-01 00:00:01,000 WARNING uvicorn.error: Invalid HTTP request received.
2026-01-01 00:00:01,000 INFO edge_rt.request: status=200 id=a stream=false prompt_tokens=3 \
completion_tokens=5 finish=length latency_ms=1.0
2026-01-01 00:00:01,000 INFO edge_rt.request: status=422 latency_ms=1.0
2026-01-01 00:00:01,000 INFO edge_rt.request: status=499 id=b stream=true prompt_tokens=3 \
completion_tokens=2 finish=cancelled latency_ms=1.0
"""


@pytest.fixture
def seen(tool: Tool) -> Any:
    return tool("soak_clients").Seen(
        statuses=Counter({200: 1, 422: 1}),
        left=1,
        answers=[("a", False, USAGE)],
        left_ids=["b"],
    )


def test_books_that_balance(tool: Tool, seen: Any) -> None:
    ledger = tool("soak_ledger").Ledger.read(LOG)
    assert list(ledger.faults(seen)) == []
    assert ledger.warnings == {"Invalid HTTP request received.": 1}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("edge_rt.request: status=422", "other: status=422", "3 requests were sent, 2 are"),
        ("status=422", "status=400", "1 clients saw 422, the log has 0"),
        ("status=422", "status=500", "status 500: 1 in the log"),
        ("id=b", "id=a", "a is 2 times in the log"),
        ("id=b", "id=c", "b is not in the log"),
        ("completion_tokens=5", "completion_tokens=4", "a was ('200', 'false', '3', '5') to its"),
        ("finish=length", "finish=open", "a has no end in the log"),
        ("WARNING", "ERROR", "the daemon logged: 2026-01-01 00:00:01,000 ERROR uvicorn"),
        ("\n2026-01-01 00:00:01,000 WARN", "\nTraceback\n2026-01-01 00:00:01,000 WARN", "Traceb"),
    ],
)
def test_books_that_do_not(tool: Tool, seen: Any, old: str, new: str, fault: str) -> None:
    assert old in LOG
    faults = list(tool("soak_ledger").Ledger.read(LOG.replace(old, new, 1)).faults(seen))
    assert any(fault in found for found in faults), faults


def test_answers_that_differ(tool: Tool) -> None:
    choice = {"text": "abc", "finish_reason": "length"}
    known = tool("soak_pool").Known({"prompt": "x"}, [choice], USAGE)
    assert known.fault([choice], USAGE) is None
    assert known.fault([choice | {"text": "abd"}], USAGE)
    assert known.fault([choice], USAGE | {"completion_tokens": 4})
    assert known.fault([], USAGE)
    cut = {"text": "ab\ufffd", "finish_reason": "timeout"}
    assert known.fault_cut_short([cut]) is None
    assert known.fault_cut_short([choice]) is None
    assert known.fault_cut_short([cut | {"text": "ac"}])
    assert known.fault_cut_short([cut | {"finish_reason": "length"}])
    assert known.fault_cut_short([])


def test_streams_that_are_not_whole(tool: Tool) -> None:
    joined = tool("soak_clients").joined

    def event(text: str, finish: str | None = None, name: str = "a") -> str:
        choice = {"index": 0, "text": text, "finish_reason": finish}
        return f"data: {json.dumps({'id': name, 'choices': [choice]})}\n\n"

    end = f"data: {json.dumps({'id': 'a', 'choices': [], 'usage': USAGE})}\n\ndata: [DONE]\n\n"
    whole = joined((event("x") + event("y", "length") + end).encode())
    assert whole["choices"] == [{"text": "xy", "finish_reason": "length"}]
    for broken in (
        event("x"),
        event("x") + event("y", "length", "b") + end,
        event("x", "length") + event("y", "length") + end,
    ):
        with pytest.raises(ValueError, match=r"stream|choice"):
            joined(broken.encode())


@pytest.mark.slow
def test_a_short_run(
    tool: Tool, demo_bundle: BundleFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "soak.json"
    arguments = ["--clients", "50", "--minutes", "0.2", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["soak", str(demo_bundle("demo.null")), *arguments])
    tool("soak").main()
    found = json.loads(out.read_text())
    assert found["faults"] == []
    assert set(found["requests_by_kind"]) == set(tool("soak_clients").KINDS)
    assert 0.4 < found["cut_off_share"] < 0.6
    assert found["answers_compared"] > 50
    assert found["log_lines"] == sum(found["log_by_status"].values()) > 100
    assert found["exit_code"] == 0
