"""tools/fleet's scrape configuration, alert rules and dashboard, with Prometheus' own programs."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fakes.pages import full, series
from fakes.promtool import program, promtool

from edge_rt.telemetry.prometheus import Exposition

FLEET = Path(__file__).parents[2] / "tools/fleet"
NAME = re.compile(r"\b(?:edge_rt|gen_ai|process|python)_[a-z0-9_]+\b")
DEADLINE_S = 120.0


def read_yaml(name: str) -> Any:
    return yaml.safe_load((FLEET / name).read_text(encoding="utf-8"))


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml("alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Those that show something."""
    board = json.loads((FLEET / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """The dashboard's, with Grafana's variables filled in."""
    return [
        target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
        for panel in panels()
        for target in panel["targets"]
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", FLEET / "prometheus.yml"),
        ("check", "rules", FLEET / "alerts.yml"),
        ("test", "rules", FLEET / "alerts_test.yml"),
    ],
    ids=["config", "rules", "tests of rules"],
)
def test_promtool_is_content(arguments: tuple[str | Path, ...]) -> None:
    promtool(*arguments)


def test_each_alert_is_shown_to_fire_and_to_stay_silent() -> None:
    shown: dict[bool, set[str]] = {True: set(), False: set()}
    for test in read_yaml("alerts_test.yml")["tests"]:
        for case in test["alert_rule_test"]:
            shown[bool(case.get("exp_alerts"))].add(case["alertname"])
    names = [rule["alert"] for rule in alert_rules()]
    assert len(names) == len(set(names))
    assert shown == {True: set(names), False: set(names)}


def test_each_alert_says_how_bad_and_what() -> None:
    for rule in alert_rules():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        assert rule["annotations"]["description"]


def test_all_that_is_asked_for_exists() -> None:
    labels = {"edge_rt"}  # job="edge_rt"
    expressions = [rule["expr"] for rule in alert_rules()] + queries()
    asked = {name for one in expressions for name in NAME.findall(one)} - labels
    assert len(asked) > 30
    assert asked - series(full()) == set()


def test_the_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(queries())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]}), encoding="utf-8")
    promtool("check", "rules", file)


def test_panels_do_not_overlap() -> None:
    board = json.loads((FLEET / "grafana-dashboard.json").read_text(encoding="utf-8"))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (at["x"] + column, at["y"] + line)
            for column in range(at["w"])
            for line in range(at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


class Handler(BaseHTTPRequestHandler):
    """GET /metrics of a daemon that knows everything."""

    page = Exposition(full())

    def do_GET(self) -> None:
        body, content_type = self.page.page(self.headers.get("Accept", ""))
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def daemon() -> Iterator[str]:
    """Its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def prometheus(daemon: str, tmp_path: Path) -> Iterator[httpx.Client]:
    """A server with the shipped configuration, which scrapes the daemon every second."""
    config = read_yaml("prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FLEET / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [daemon]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        program("prometheus", "prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
        with httpx.Client(base_url=f"http://{address}/api/v1/", timeout=30) as client:
            yield client
        process.terminate()
        process.wait(DEADLINE_S)


def answer(client: httpx.Client, query: str) -> list[dict[str, Any]]:
    found = client.get("query", params={"query": query}).json()
    assert found["status"] == "success", found
    result: list[dict[str, Any]] = found["data"]["result"]
    return result


def wait_for_scrapes(client: httpx.Client, scrapes: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            found = answer(client, 'sum_over_time(up{job="edge_rt"}[2m])')
            if found and float(found[0]["value"][1]) >= scrapes:
                return
        except (httpx.HTTPError, ValueError):
            pass  # it starts
        time.sleep(0.2)
    pytest.fail("Prometheus did not scrape the page")


@pytest.mark.slow
def test_a_real_scrape_fills_every_panel(prometheus: httpx.Client) -> None:
    """What Prometheus reads from a page, in the format that it asks for, is all that is on it."""
    wait_for_scrapes(prometheus, 3)
    names = set(prometheus.get("label/__name__/values").json()["data"])
    assert series(full()) - names == set()
    assert [query for query in queries() if not answer(prometheus, query)] == []
    noticed = {
        alert["labels"]["alertname"]: alert["labels"]
        for alert in prometheus.get("alerts").json()["data"]["alerts"]
    }
    # What `full` complains of; its page stands still, so that no record seems to get through.
    assert set(noticed) == {"EdgeRtSensorLost", "EdgeRtSpoolFault", "EdgeRtRecordsWait"}
    assert noticed["EdgeRtSensorLost"]["metric"] == "temperature_cv0"
