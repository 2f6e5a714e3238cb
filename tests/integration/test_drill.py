"""``hvdrecover drill``: of scripts that recover, from all faults, and of scripts with a bug; the demo."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support.commands import DRILL_PATIENCE, Drilled, call, drill

DEMO = Path(__file__).parents[2] / "scripts" / "demo"
QUICK = ("--epochs", "2", "--step-seconds", "0.1", "--commit-every", "2")
TORCH = ("-m", "hvdrecover.examples.torch_digits")
NEEDS_MORE = {"host-cut-off", "resize"}
FAULTS = {
    *("kill", "kill-all", "kill-supervisor", "stop", "loop", "out-of-memory", "script-error", "preempt"),
    *("storage-away", "disk-full", "corrupt-commit", *NEEDS_MORE),
}
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(DRILL_PATIENCE + 60)]


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """All faults, each once."""
    words = ["--seed", "1", "--no-standby", "--", sys.executable, *TORCH]
    return drill(tmp_path_factory.mktemp("torch"), *words, *QUICK)


def test_the_torch_example_recovers_from_each_fault_that_can_strike_here(of_torch: Drilled) -> None:
    assert of_torch.found["findings"] == [], of_torch.words
    assert (of_torch.code, of_torch.found["recovers"], of_torch.found["schema"]) == (0, True, 1)
    assert set(of_torch.found["skipped"]) == NEEDS_MORE
    assert set(of_torch.found["kinds"]) == FAULTS - NEEDS_MORE
    for name, kind in of_torch.found["kinds"].items():
        assert (kind["count"], kind["recovered"]) == (1, 1), name
    for run in of_torch.found["runs"]:
        assert run["comparison"]["samples_miscounted"] == 0 and run["comparison"]["compared"] > 40
    assert of_torch.found["runs"][-1]["missed"] == []


def test_the_text_has_the_verdict_each_fault_and_where_to_read_on(of_torch: Drilled) -> None:
    assert of_torch.words.startswith("verdict: the script recovers\n")
    for word in (*FAULTS, "commits compared bit by bit", "0 samples lost or repeated"):
        assert word in of_torch.words
    assert f"hvdrecover report {of_torch.folder / 'faults-1' / 'events'}" in of_torch.words
    assert (of_torch.folder / "verdict.txt").read_text() == of_torch.words


@LONG
def test_virtual_ranks_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    words = ["--resize", "--no-standby", "--", sys.executable, "-m", "hvdrecover.examples.torch_digits"]
    drilled = drill(tmp_path / "drill", *words, *QUICK, "--virtual-ranks", "2")
    assert drilled.found["findings"] == [], drilled.words
    assert (drilled.code, set(drilled.found["kinds"])) == (0, {"resize", "kill", "kill-all"})
    assert all(run["comparison"]["compared"] > 40 for run in drilled.found["runs"])


@LONG
def test_the_demo_shows_three_faults_and_the_same_weights(tmp_path: Path) -> None:
    command = [str(DEMO), "--output", str(tmp_path / "drill")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("verdict: the script recovers\n")
    for fault in ("kill", "stop", "kill-supervisor"):
        assert re.search(rf"^{fault} +1 +1  \d+\.\d s$", done.stdout, re.MULTILINE)
    assert re.search(r"^[1-9]\d* commits compared bit by bit", done.stdout, re.MULTILINE)
    assert "0 samples lost or repeated" in done.stdout


FORGETFUL = Path(__file__).with_name("scripts") / "forgetful_digits.py"


# Other bugs are found in made-up records, see tests/unit/drill/test_check.py.
def test_a_bug_is_found_and_its_place_and_remedy_are_named(tmp_path: Path) -> None:
    drilled = drill(
        tmp_path / "drill", "--faults", "kill-all", "--no-standby", "--", sys.executable, FORGETFUL
    )
    assert (drilled.code, drilled.found["recovers"]) == (1, False)
    first = drilled.found["findings"][0]
    assert first["check"] == "commits equal those of the undisturbed run"
    assert "optimizer.param_groups.0.lr is" in first["message"]
    told = f"FAILED: {first['check']}\n  {first['message']}\n  What to do: {first['remedy']}\n"
    assert told in drilled.words and first["remedy"].endswith(".")


def test_a_script_that_fails_undisturbed_can_not_be_drilled(tmp_path: Path) -> None:
    script = "import hvdrecover.torch; raise SystemExit('the data are not there')"
    done = call("drill", "-np", "1", "--output", tmp_path / "drill", "--", sys.executable, "-c", script)
    assert done.returncode == 1
    assert "fails even undisturbed" in done.stderr and "the data are not there" in done.stderr
