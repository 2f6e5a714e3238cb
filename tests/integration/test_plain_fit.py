"""A plain Keras script resumes inside its calls of ``fit``, with no line changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LONG
from tests.support.jobs import PREEMPTED, run_job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "plain_fit.py"
EPOCHS = {"1": 2, "2": 3}  # of each fit of the script

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, light: None) -> list[Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, "--no-standby")
    return outcomes(folder)


def run(folder: Path, *options: str, code: int = 0, **environ: str) -> str:
    settings = {"OMP_NUM_THREADS": "1", **environ}  # for sums that are the same
    command = [*supervised(*options), sys.executable, str(SCRIPT), str(folder)]
    return run_job(command, folder / "log", settings, code=code)


def outcomes(folder: Path) -> list[Any]:
    return [json.loads((folder / f"outcome-{rank}").read_text()) for rank in (0, 1)]


def test_each_fit_trains_on_each_sample_once_an_epoch(undisturbed: list[Any]) -> None:
    for rank in undisturbed:
        assert set(rank["1"]["counts"]) == {EPOCHS["1"]}
        assert set(rank["2"]["counts"]) == {EPOCHS["1"] + EPOCHS["2"]}
        assert [rank[fit]["history"][0] for fit in EPOCHS] == [[0, 1], [0, 1, 2]]
    assert undisturbed[0]["2"]["history"] == undisturbed[1]["2"]["history"]  # metrics are averaged
    assert undisturbed[0]["2"]["weights"] != undisturbed[0]["1"]["weights"]


@pytest.mark.parametrize(
    ("faults", "has_root"),
    [
        # In the second fit, the new process has traced less than the other. Without a root, the one that
        # replaces a rank lost in the second fit gets the first's end from the other.
        (["1 4 SIGKILL 1", "2 4 SIGSTOP 1", "2 13 SIGKILL 0"], False),
        pytest.param(["1 0 SIGKILL 1"], False, marks=LONG),  # outside fit: all ranks start again together
        pytest.param(["1 12 SIGKILL all"], True, marks=LONG),
    ],
)
def test_after_kills_and_a_hang_in_mid_epoch_it_ends_as_undisturbed(
    faults: list[str], has_root: bool, undisturbed: list[Any], tmp_path: Path
) -> None:
    options = ["--checkpoint", str(tmp_path / "root")] if has_root else []
    log = run(tmp_path, "--hang-timeout", "20", *options, FAULTS="\n".join(faults))
    assert len(list(tmp_path.glob("struck-*"))) == len(faults)
    assert "model.fit resumes after faults" in log
    assert "a fault does not restore the attributes of these callbacks: Seen" in log
    assert_equal(outcomes(tmp_path), undisturbed)


def test_a_job_that_was_killed_as_a_whole_and_preempted_in_mid_epoch_ends_as_undisturbed(
    undisturbed: list[Any], tmp_path: Path
) -> None:
    options = ["--no-standby", "--checkpoint", str(tmp_path / "root")]
    run(tmp_path, *options, code=PREEMPTED, FAULTS="2 13 SIGKILL all\n2 4 SIGTERM 1")
    assert not list(tmp_path.glob("outcome-*"))
    run(tmp_path, *options)
    assert_equal(outcomes(tmp_path), undisturbed)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Assert that the outcomes of all ranks are equal, fit by fit and part by part."""
    for mine, theirs in zip(found, expected, strict=True):
        for fit in EPOCHS:
            for part, value in theirs[fit].items():
                assert mine[fit][part] == value, (fit, part)
