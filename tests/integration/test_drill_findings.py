"""``hvdrecover drill`` of scripts with a bug, or a habit, that only a fault brings to light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.integration.drills import KILL_ALL, LONGEST, drill

BUGGY = Path(__file__).with_name("scripts") / "buggy_digits.py"
RESHUFFLING = BUGGY.with_name("reshuffling_tensorflow.py")
BATCH_NORM = BUGGY.with_name("batch_norm_digits.py")
SHRINKING = BUGGY.with_name("shrinking_digits.py")
SAME_COMMITS = "commits equal those of the undisturbed run"
STEP_FIRST = "each commit comes after its step"
REPRODUCIBLE = "the script is reproducible"
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(LONGEST + 60)]


# All are found in a fake job, too: see tests/unit/state/test_buggy_scripts.py.
@pytest.mark.parametrize(
    ("bug", "name", "word"),
    [
        pytest.param("resets its optimizer", SAME_COMMITS, "of optimizer (", marks=LONG),
        pytest.param("resets a counter", SAME_COMMITS, "batch is", marks=LONG),
        ("forgets a counter", SAME_COMMITS, "optimizer.param_groups.0.lr is"),
        pytest.param("reshuffles", REPRODUCIBLE, "of model (", marks=LONG),
        pytest.param("commits before the step", STEP_FIRST, "recorded batches, but", marks=LONG),
    ],
)
def test_a_bug_is_found_and_its_place_and_remedy_are_named(
    bug: str, name: str, word: str, tmp_path: Path
) -> None:
    drilled = drill(tmp_path / "drill", *KILL_ALL, sys.executable, str(BUGGY), bug, "1")
    assert (drilled.code, drilled.found["recovers"]) == (1, False)
    first = drilled.found["findings"][0]
    assert first["check"] == name
    assert word in first["message"]
    told = f"FAILED: {name}\n  {first['message']}\n  What to do: {first['remedy']}\n"
    assert told in drilled.words and first["remedy"].endswith(".")


@LONG
def test_samples_that_differ_after_a_fault_are_found_for_tensorflow_too(tmp_path: Path) -> None:
    drilled = drill(tmp_path / "drill", *KILL_ALL, sys.executable, str(RESHUFFLING))
    first = drilled.found["findings"][0]
    assert (drilled.code, first["check"]) == (1, REPRODUCIBLE)
    assert "of model (" in first["message"]


@LONG
def test_rank_local_state_is_named_as_that_and_is_no_failure(tmp_path: Path) -> None:
    words = ["--no-standby", "--faults", "kill", "--", sys.executable, str(BATCH_NORM)]
    drilled = drill(tmp_path / "drill", *words)
    assert drilled.found["findings"] == [], drilled.words
    assert (drilled.code, drilled.found["verdict"]) == (0, "recovers, but for rank-local state")
    last = drilled.found["runs"][-1]["comparison"]  # the run in which it struck
    assert last["compared"] >= 15
    assert {"model.2.running_mean", "model.2.running_var"} <= set(last["rank_local"])
    assert all(each.startswith(("model.2.running_", "losses")) for each in last["rank_local"])
    assert "ok, but: rank-local state" in drilled.words


def test_a_script_that_fails_undisturbed_can_not_be_drilled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdrecover", "drill", "-np", "1", "--output", str(tmp_path / "drill")]
    command += ["--", sys.executable, "-c"]
    command += ["import hvdrecover.torch; raise SystemExit('the data are not there')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "fails even undisturbed" in done.stderr and "the data are not there" in done.stderr


@LONG
def test_commits_are_compared_until_a_rank_is_lost_for_good(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    words = ["--min-np", "1", "--discover", f"file {hosts}", *KILL_ALL]
    drilled = drill(tmp_path / "drill", *words, sys.executable, str(SHRINKING), str(hosts), "2e-3")
    assert (drilled.code, hosts.read_text()) == (0, "localhost:1\n"), drilled.words
    assert "nothing was compared, as 1 of 2 ranks went on" in drilled.words
