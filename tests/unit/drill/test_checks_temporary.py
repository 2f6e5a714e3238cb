from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.drill.checks import rules, temporary
from hvdrecover.drill.checks.temporary import Ended, Left


def trainings(*counts: int) -> list[Ended]:
    return [
        Ended("training", pid, tuple(f"/tmp/{pid}.{number}" for number in range(count)))
        for pid, count in enumerate(counts, 100)
    ]


@pytest.mark.parametrize(
    ("clean", "drilled", "who"),
    [
        ([0, 0], [0, 0, 0], None),
        ([0, 0], [0, 1], 101),
        ([2, 0], [2, 2, 1], None),  # what any process leaves has nothing to do with recoveries
        ([2, 0], [1, 2, 3], 102),
        ([], [1], 100),
    ],
)
def test_a_process_that_leaves_more_than_any_did_undisturbed_is_found(
    clean: list[int], drilled: list[int], who: int | None
) -> None:
    found = temporary.leaks(trainings(*clean), trainings(*drilled))
    assert [each.rule for each in found] == [rules.NO_TEMPORARY_FILES] * (who is not None)
    assert all(f"training process {who}" in each.message for each in found)


def test_processes_are_held_against_those_that_do_the_same() -> None:
    (found,) = temporary.leaks(trainings(3), [Ended("worker", 7, ("/tmp/x",))])
    assert "worker process 7" in found.message and "/tmp/x" in found.message


def test_all_files_below_a_folder_are_left_with_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "made" / "inside").mkdir(parents=True)
    (tmp_path / "made" / "a").write_bytes(b"123")
    (tmp_path / "b").symlink_to("missing")
    assert temporary.left(tmp_path) == Left(2, 3 + len("missing"))
    assert temporary.left(tmp_path / "nowhere") == Left()
