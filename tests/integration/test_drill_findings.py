"""``hvdrecover drill`` of scripts with a bug, or a habit, that only a fault brings to light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rules import Rule
from tests.integration.conftest import LONG
from tests.integration.drills import KILL_ALL, LONGEST, drill

BUGGY = Path(__file__).with_name("scripts") / "buggy_digits.py"
RESHUFFLING = BUGGY.with_name("reshuffling_tensorflow.py")
BATCH_NORM = BUGGY.with_name("batch_norm_digits.py")
SHRINKING = BUGGY.with_name("shrinking_digits.py")
pytestmark = pytest.mark.timeout(LONGEST + 60)


# All but the last are caught in a fake job, too: see tests/unit/elastic/test_buggy_scripts.py.
@pytest.mark.parametrize(
    ("bug", "rule"),
    [
        pytest.param("resets its optimizer", rules.NOT_OVERWRITTEN, marks=LONG),
        pytest.param("resets a counter", rules.COUNTERS, marks=LONG),
        pytest.param("forgets a counter", rules.WEIGHTS, marks=LONG),
        pytest.param("reshuffles", rules.DATA, marks=LONG),
        pytest.param("commits before the step", rules.STEP_FIRST, marks=LONG),
        ("leaks a temporary file", rules.NO_TEMPORARY_FILES),
    ],
)
def test_a_bug_is_caught_and_the_rule_that_it_breaks_is_named(bug: str, rule: Rule, tmp_path: Path) -> None:
    drilled = drill(tmp_path / "drill", *KILL_ALL, sys.executable, str(BUGGY), bug, "1")
    assert (drilled.code, drilled.found["recovers"]) == (1, False)
    first = drilled.found["findings"][0]
    assert (first["rule"], first["remedy"]) == (rule.name, rule.remedy)
    assert f"{rule.name}: {first['message']}" in drilled.words
    if rule is rules.NO_TEMPORARY_FILES:  # the training itself recovers
        assert len(drilled.found["findings"]) == 1


@LONG
def test_samples_that_are_others_after_a_fault_are_caught_for_tensorflow_too(tmp_path: Path) -> None:
    drilled = drill(tmp_path / "drill", *KILL_ALL, sys.executable, str(RESHUFFLING))
    first = drilled.found["findings"][0]
    assert (drilled.code, first["rule"]) == (1, rules.DATA.name)
    assert "dealt another batch by state.data" in first["message"]


def test_what_each_rank_has_of_its_own_is_named_as_that(tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text("rank_local = 0\n")
    words = [
        "--no-standby",
        "--faults",
        "kill-rank-0",
        "--slo",
        str(tmp_path / "slo.toml"),
        "--",
        sys.executable,
    ]
    drilled = drill(tmp_path / "drill", *words, str(BATCH_NORM))
    assert drilled.found["findings"] == [], drilled.words
    assert (drilled.found["recovers"], list(drilled.found["missed"])) == (True, ["rank_local"])
    assert drilled.code == 1  # as it was asked for
    assert drilled.found["verdict"] == "recovers, but for rank-local state"
    last = drilled.found["runs"][-1]  # the one in which it struck
    assert last["commits_compared"] >= 15
    named = last["rank_local"]
    assert {"model.2.running_mean", "model.2.running_var"} <= set(named)
    assert all(each.startswith(("model.2.running_", "losses")) for each in named)
    assert drilled.found["rank_local"]["remedy"] == rules.RANK_LOCAL.remedy
    page = (drilled.folder / "report.html").read_text()
    assert "but for rank-local state" in drilled.words and "but for rank-local state" in page


def test_a_script_that_fails_undisturbed_can_not_be_drilled(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hvdrecover",
        "drill",
        "-np",
        "1",
        "--output",
        str(tmp_path / "drill"),
        "--",
    ]
    command += [sys.executable, "-c", "import hvdrecover.torch; raise SystemExit('the data are not there')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "fails even undisturbed" in done.stderr and "the data are not there" in done.stderr


@pytest.mark.parametrize(("rate", "code"), [pytest.param("2e-3", 0, marks=LONG), ("1", 1)])
def test_where_a_rank_is_lost_for_good_losses_are_compared(rate: str, code: int, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    words = ["--min-np", "1", "--discover", f"file {hosts}", "--faults", "kill-all", "--no-standby", "--"]
    drilled = drill(tmp_path / "drill", *words, sys.executable, str(SHRINKING), str(hosts), rate)
    assert drilled.code == code, drilled.words
    assert [each["rule"] for each in drilled.found["findings"]] == [rules.LOSS.name] * code
    assert hosts.read_text() == "localhost:1\n"
    assert {run["unproven"] for run in drilled.found["runs"]} == {""}
