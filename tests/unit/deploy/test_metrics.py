"""The alerts and the dashboard ask for metrics that exist, in words that Prometheus understands."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hvdrecover.record import read
from hvdrecover.reporting.prometheus import Exporter
from hvdrecover.reporting.summary import Run
from tests.unit.deploy.queries import RULES, of_alerts, of_dashboard
from tests.unit.reporting.runs import example

_PROMTOOL = shutil.which("promtool")
promtool = pytest.mark.skipif(_PROMTOOL is None, reason="there is no promtool; apt-get install prometheus")
_METRIC = re.compile(r"\bhvdrecover_\w+(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Of each metric of a run, its labels with their values."""
    folder = tmp_path_factory.mktemp("events")
    run = example(folder)
    run.report(105, "durable", pid=11, generation=3, commit=7, bytes=1000, seconds=1.5)
    exporter = Exporter("runs/1")
    exporter.update(Run(read(folder)).report())
    found: dict[str, dict[str, set[str]]] = {}
    for family in text_string_to_metric_families(generate_latest(exporter.registry).decode()):
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                values.setdefault(label, set()).add(value)
    return found


def test_queries_ask_for_metrics_and_labels_that_exist(labels: dict[str, dict[str, set[str]]]) -> None:
    queries = [*of_alerts().values(), *(query for queries in of_dashboard().values() for query in queries)]
    for query in queries:
        asked = list(_METRIC.finditer(query))
        assert asked, query
        for metric in asked:
            name = metric[0].partition("{")[0]
            assert name in labels, query
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', metric[1] or ""):
                if label not in ("job", "instance"):  # Prometheus's own
                    assert set(value.split("|")) <= labels[name][label], query
    own = {label for values in labels.values() for label in values} | {"job", "instance"}
    for query in queries:
        for words in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert {word.strip() for word in words.split(",")} <= own, query


def run_promtool(*arguments: object) -> str:
    command = [str(_PROMTOOL), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@promtool
def test_alerts_fire_when_they_should() -> None:
    run_promtool("check", "rules", RULES)
    tests = Path(__file__).with_name("rules_test.yml")
    assert "SUCCESS" in run_promtool("test", "rules", tests)
    assert all(name in tests.read_text() for name in of_alerts())


@promtool
def test_prometheus_understands_the_dashboard_s_queries(tmp_path: Path) -> None:
    queries = [each for queries in of_dashboard().values() for each in queries]
    rules = [{"record": f"query_{number}", "expr": each} for number, each in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run_promtool("check", "rules", file)
