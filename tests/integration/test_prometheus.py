"""A real Prometheus scrapes the metrics of a run, and evaluates the alerts and the dashboard's queries."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import wait_until
from tests.support.jobs import PATIENCE
from tests.unit.reporting.runs import REPLACED, TWO, Run

_DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = _DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = _DEPLOY / "grafana" / "dashboard.json"
PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="there is no Prometheus; apt-get install --no-install-recommends prometheus"
)


def of_alerts() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def of_dashboard(instances: str = ".*") -> dict[str, list[str]]:
    """Title of a panel to its queries, about some instances."""
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return {
        panel["title"]: [target["expr"].replace("$instance", instances) for target in panel["targets"]]
        for panel in dashboard["panels"]
    }


class Prometheus:
    """A server on the loopback that scrapes one endpoint every second."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **options: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(options)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return found["data"]

    def query(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

    def values(self, query: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.query(query)]


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the alerts; it answers when this begins."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "hvdrecover", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data"}
    words["web.listen-address"] = f"127.0.0.1:{port}"
    command = [str(PROMETHEUS), *(f"--{name}={value}" for name, value in words.items())]
    with running(command, folder / "log") as process:
        server = Prometheus(port)

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return bool(server.get("status/buildinfo"))
            except OSError:
                return False

        wait_until(answers, PATIENCE)
        yield server


def test_prometheus_scrapes_a_run_to_its_end(tmp_path: Path) -> None:
    run = Run(tmp_path / "events", begin=time.time() - 200.0)
    run.report(0, "start", "node-1", 5, attempt=1, command=["python", "train.py"])
    run.rendezvous(4, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 14, 2: 24})
    run.report(25, "durable", pid=10, generation=1, commit=2, bytes=1000, seconds=0.5)
    command = [sys.executable, "-m", "hvdrecover", "report", str(tmp_path / "events"), "--watch"]
    with running([*command, "--prometheus", "127.0.0.1:0"], tmp_path / "watch.log") as watch:
        told = tmp_path / "watch.log"
        wait_until(lambda: "metrics are served" in told.read_text(), PATIENCE)
        match = re.search(r"metrics are served at (\S+)", told.read_text())
        assert match is not None
        with scraping(match[1], tmp_path) as prometheus:
            wait_until(
                lambda: prometheus.values('hvdrecover_activity{activity="training"}') == [1.0], PATIENCE
            )
            (target,) = prometheus.get("targets")["activeTargets"]
            assert (target["health"], target["lastError"]) == ("up", "")
            assert prometheus.values("hvdrecover_commits_total") == [2.0]
            assert prometheus.values("hvdrecover_last_durable_commit") == [2.0]
            kinds = {each["metric"]: each["type"] for each in prometheus.get("targets/metadata")}
            assert kinds["hvdrecover_commits"] == "counter"
            assert kinds["hvdrecover_last_commit"] == "gauge"

            run.fault(100, "crash", host="node-2", rank=1, commit=[1, 2], steps=4)
            run.reset(100.1, {0: TWO[0]}, steps=4)
            run.rendezvous(100.2, REPLACED, 2, 2)
            run.step(100.3, REPLACED, 2, 2)
            run.commit(REPLACED, 2, {3: 110})
            wait_until(lambda: prometheus.values("hvdrecover_recovery_seconds_count") == [1.0], PATIENCE)
            assert prometheus.values('hvdrecover_faults_total{kind="crash"}') == [1.0]

            for title, queries in of_dashboard().items():
                assert [each for query in queries for each in prometheus.query(query)], title

            def alerts() -> dict[str, str]:
                groups = prometheus.get("rules")["groups"]
                return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

            wait_until(lambda: alerts() == dict.fromkeys(of_alerts(), "ok"), PATIENCE)
            assert prometheus.query("ALERTS") == []

            # Whoever serves the metrics ends with the run, but not before its end was scraped.
            run.report(120, "end", "node-1", 5, code=75, reason="preempted")
            assert watch.wait(PATIENCE) == 1
            ended = 'ALERTS{alertname="HvdrecoverEndedUnfinished", alertstate="firing"}'
            wait_until(lambda: prometheus.values(ended) == [1.0], PATIENCE)


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool; apt-get install prometheus")
def test_alerts_fire_when_they_should() -> None:
    tests = Path(__file__).with_name("alerts.yml")
    for command in (["check", "rules", RULES], ["test", "rules", tests]):
        subprocess.run(["promtool", *command], check=True, timeout=120)
    assert all(name in tests.read_text() for name in of_alerts())
