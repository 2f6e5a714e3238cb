"""``hvdrecover drill`` of scripts that recover: all faults, each once; a replay; virtual ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hvdrecover.drill.faults import FAULTS
from tests.integration.browser import CUT, PHONE, Browser
from tests.integration.conftest import LONG
from tests.integration.drills import LONGEST, QUICK, Drilled, drill

TORCH = ("-m", "hvdrecover.examples.torch_digits")
# TensorFlow traces its functions anew after each recovery, for seconds.
TENSORFLOWS = "kill-all,preemption"
NEEDS_MORE = {"data-changed", "host-cut-off", "host-powered-off", "resize"}
if os.geteuid() != 0:
    NEEDS_MORE.add("tmpfs-full")
pytestmark = pytest.mark.timeout(LONGEST + 60)


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
