"""Jobs of two workers whose processes differ in what must not matter to the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.launch.job import Job
from tests.integration.conftest import WHOLE
from tests.support.jobs import PATIENCE, supervised

SCRIPT = Path(__file__).with_name("scripts") / "changed_starts.py"
ONE_THEN_ALL = [[5, 1], [9, 0, 1]]
"""Rank 1's new process gets the state from rank 0's memory. Later both load the durable commit of step 6."""
ALL = [[9, 0, 1]]


def weights(folder: Path, kind: str, kills: list[list[int]], starts: int) -> Any:
    """Run the script; return the weights that both ranks end with."""
    folder.mkdir()
    words = [str(SCRIPT), str(folder), kind, json.dumps(kills)]
    command = [*supervised("--no-standby", "--hang-timeout", "20"), sys.executable, *words]
    job = Job(command, folder / "log", {"OMP_NUM_THREADS": "1", **WHOLE})
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    assert len((folder / "starts").read_text().split()) == starts, job.tail()
    found = [json.loads((folder / f"weights-{rank}").read_text()) for rank in range(2)]
    assert found[0] == found[1], job.tail()
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return weights(tmp_path_factory.mktemp("undisturbed") / "job", "plain", [], starts=2)


@pytest.mark.parametrize("kind", ["sets", "unnamed"])
def test_the_order_in_which_each_process_builds_groups_changes_no_weight(
    kind: str, undisturbed: Any, tmp_path: Path
) -> None:
    assert weights(tmp_path / "job", kind, ONE_THEN_ALL, starts=5) == undisturbed


def test_a_start_without_torch_compile_continues_one_with_it(undisturbed: Any, tmp_path: Path) -> None:
    assert weights(tmp_path / "job", "compiled", ALL, starts=4) == undisturbed


def test_a_rank_whose_commit_fails_and_that_goes_on_keeps_no_other_waiting(
    undisturbed: Any, tmp_path: Path
) -> None:
    assert weights(tmp_path / "job", "refused", [], starts=2) == undisturbed
    log = (tmp_path / "job" / "log").read_text()
    assert "resuming from" not in log  # as after Horovod has given up to wait
