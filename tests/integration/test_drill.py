"""``hvdrecover drill`` of scripts that recover: all faults, each once; virtual ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support.drills import PATIENCE, QUICK, Drilled, drill

TORCH = ("-m", "hvdrecover.examples.torch_digits")
NEEDS_MORE = {"host-cut-off", "resize"}
FAULTS = {
    *("kill", "kill-all", "kill-supervisor", "stop", "loop", "out-of-memory", "script-error", "preempt"),
    *("storage-away", "disk-full", "corrupt-commit", *NEEDS_MORE),
}
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(PATIENCE + 60)]


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
