"""The alerts and the dashboard ask for metrics that exist, in words that Prometheus understands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.queries import RULES, of_alerts

_PROMTOOL = shutil.which("promtool")
promtool = pytest.mark.skipif(_PROMTOOL is None, reason="there is no promtool; apt-get install prometheus")


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
