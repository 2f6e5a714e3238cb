"""``hvdrecover drill`` of scripts that recover, and of those with a bug that only a fault brings to light."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rules import Rule
from hvdrecover.drill.faults import FAULTS
from tests.integration.browser import CUT, PHONE, Browser
from tests.integration.conftest import LONG

TORCH = ("-m", "hvdrecover.examples.torch_digits")
BUGGY = Path(__file__).with_name("scripts") / "buggy_digits.py"
RESHUFFLING = BUGGY.with_name("reshuffling_tensorflow.py")
BATCH_NORM = BUGGY.with_name("batch_norm_digits.py")
SHRINKING = BUGGY.with_name("shrinking_digits.py")
QUICK = ("--epochs", "2", "--step-seconds", "0.1", "--commit-every", "2")
# TensorFlow traces its functions anew after each recovery, for seconds.
TENSORFLOWS = "kill-all,preemption"
LONGEST = 2400  # seconds; a recovery takes most of a minute on a machine that has much else to do
KILL_ALL = ("--faults", "kill-all", "--no-standby", "--")
NEEDS_MORE = {"data-changed", "host-cut-off", "host-powered-off", "resize"}
if os.geteuid() != 0:
    NEEDS_MORE.add("tmpfs-full")
pytestmark = pytest.mark.timeout(LONGEST + 60)


@dataclass(frozen=True)
class Drilled:
    """A drill that has ended: its exit code, its JSON, what people see, and its folder."""

    code: int
    found: dict[str, Any]
    words: str
    folder: Path


def drill(folder: Path, *words: str) -> Drilled:
    command = [sys.executable, "-m", "hvdrecover", "drill", "-np", "2", "--output", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    assert (folder / "report.json").exists(), done.stderr
    return Drilled(done.returncode, json.loads((folder / "report.json").read_text()), done.stdout, folder)


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """All faults, each once."""
    slo = tmp_path_factory.mktemp("slo") / "slo.toml"
    slo.write_text("samples_lost = 0\n")
    words = ["--seed", "1", "--slo", str(slo), "--no-standby", "--", sys.executable, *TORCH]
    return drill(tmp_path_factory.mktemp("torch"), *words, *QUICK)


def test_the_torch_example_recovers_from_all_that_can_strike_here(of_torch: Drilled) -> None:
    assert of_torch.found["findings"] == [], of_torch.words
    assert (of_torch.code, of_torch.found["recovers"]) == (0, True)
    assert set(of_torch.found["skipped"]) == NEEDS_MORE
    assert set(of_torch.found["kinds"]) == set(FAULTS) - NEEDS_MORE
    for name, kind in of_torch.found["kinds"].items():
        assert (kind["count"], kind["recovered"]) == (1, 1), name
    assert of_torch.found["numbers"]["samples_lost"] == 0
    assert all(run["commits_compared"] > 40 for run in of_torch.found["runs"])
    assert of_torch.found["runs"][-1]["missed"] == []


def test_what_people_see_names_the_verdict_the_faults_and_what_to_set(of_torch: Drilled) -> None:
    for word in ("verdict", "recovers", "kill-all", "--grace", "--hang-timeout", "Checkpoint(every_seconds="):
        assert word in of_torch.words
    page = (of_torch.folder / "report.html").read_text()
    assert "recovers" in page and f"Run {len(of_torch.found['runs'])}" in page


def test_a_schedule_is_replayed_and_what_is_missed_is_named(of_torch: Drilled, tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text("goodput = 1.0\n")
    schedule = json.loads((of_torch.folder / "schedule.json").read_text())
    schedule["runs"] = [schedule["runs"][0][:1]]
    (tmp_path / "schedule.json").write_text(json.dumps(schedule))
    words = [
        "--replay",
        str(tmp_path / "schedule.json"),
        "--slo",
        str(tmp_path / "slo.toml"),
        "--",
    ]
    again = drill(tmp_path / "again", *words, sys.executable, *TORCH, *QUICK)
    (run,) = again.found["runs"]
    (strike,) = run["struck"]
    assert [{key: strike[key] for key in ("fault", "rank", "commit")}] == schedule["runs"][0]
    assert json.loads((again.folder / "schedule.json").read_text()) == schedule
    assert (again.code, again.found["recovers"], list(again.found["missed"])) == (1, True, ["goodput"])


@LONG
def test_the_tensorflow_example_recovers(tmp_path: Path) -> None:
    words = ["--seed", "1", "--faults", TENSORFLOWS, "--no-standby", "--", sys.executable]
    drilled = drill(tmp_path / "drill", *words, "-m", "hvdrecover.examples.tensorflow_digits", *QUICK)
    assert drilled.found["findings"] == [], drilled.words
    assert (drilled.code, set(drilled.found["kinds"])) == (0, set(TENSORFLOWS.split(",")))
    assert drilled.found["numbers"]["samples_lost"] == 0


@LONG
def test_virtual_ranks_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    words = ["--resize", "--no-standby", "--", sys.executable, "-m", "hvdrecover.examples.torch_digits"]
    drilled = drill(tmp_path / "drill", *words, *QUICK, "--virtual-ranks", "2")
    assert drilled.found["findings"] == [], drilled.words
    assert (drilled.code, set(drilled.found["kinds"])) == (0, {"resize", "kill", "kill-rank-0", "kill-all"})
    assert all(run["commits_compared"] > 40 for run in drilled.found["runs"])


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


@pytest.mark.parametrize("width", [PHONE, 1100])
def test_the_page_fits_any_screen_and_asks_for_nothing(of_torch: Drilled, tab: Browser, width: int) -> None:
    page = of_torch.folder / "report.html"
    tab.open(page, width)
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(CUT) == []
    asked = [event["request"]["url"] for event in tab.told("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert tab.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []
    shown = tab.value("document.body.innerText")
    assert "recovers" in shown
    for name in of_torch.found["kinds"]:
        assert name in shown


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
