"""``hvdrecover drill`` of a script with a bug that only a fault shows, and of one that cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import DRILL_PATIENCE, call, drill

FORGETFUL = Path(__file__).with_name("scripts") / "forgetful_digits.py"
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(DRILL_PATIENCE + 60)]


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
