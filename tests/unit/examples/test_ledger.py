from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.examples.ledger import Ledger
from tests.support.ledger import Batch, committed, read


def batch(generation: int, commit: int, *indices: int, time: float = 0.0) -> Batch:
    return Batch(time, 1, 0, 1, generation, commit, 0, indices)


def state_at(generation: int, commit: int, epoch: int = 0) -> Any:
    return SimpleNamespace(last_commit=CommitId(generation, commit), epoch=epoch)


# -- committed ---------------------------------------------------------------------------------------------


def test_batches_after_the_commit_that_a_later_generation_continued_from_are_lost() -> None:
    batches = [batch(1, 0, 1), batch(1, 1, 2), batch(1, 2, 3), batch(2, 2, 4)]
    assert [found.indices for found in committed(batches, {1: 0, 2: 2})] == [(1,), (2,), (4,)]


def test_a_batch_before_the_commit_of_the_same_number_counts() -> None:
    assert committed([batch(1, 1)], {1: 0, 2: 2}) == [batch(1, 1)]


def test_a_generation_may_go_back_behind_the_one_before_it() -> None:
    batches = [batch(1, 0, 1), batch(1, 4, 2), batch(2, 5, 3), batch(3, 1, 4)]
    assert [found.indices for found in committed(batches, {1: 0, 2: 5, 3: 1})] == [(1,), (4,)]


# -- writing and reading -----------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    state = state_at(2, 7, epoch=4)
    log = Ledger(folder, state)
    log.batch(1, 3, [10, 20])
    state.epoch = 5
    log.batch(1, 3, [])
    first, second = read(folder)
    assert dataclasses.replace(first, time=0.0, pid=0) == Batch(0.0, 0, 1, 3, 2, 7, 4, (10, 20))
    assert (second.epoch, second.indices) == (5, ())
    assert first.time <= second.time


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Ledger(None, state_at(1, 0)).batch(0, 1, [1])
    assert list(tmp_path.iterdir()) == []


def write(folder: Path, name: str, *batches: Batch, rest: str = "") -> None:
    lines = [json.dumps(list(dataclasses.asdict(one).values())) + "\n" for one in batches]
    (folder / name).write_text("".join(lines) + rest)


def test_batches_of_all_processes_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    write(tmp_path, "a-1.jsonl", batch(1, 0, 1, time=1.0), batch(1, 0, 3, time=3.0))
    write(tmp_path, "b-2.jsonl", batch(1, 0, 2, time=2.0))
    assert [one.indices for one in read(tmp_path)] == [(1,), (2,), (3,)]


@pytest.mark.parametrize("rest", ["[1.0, 5", "[1.0, 5, 0, 1, 1, 0, 0, [1, 2", "["])
def test_a_line_that_a_killed_process_left_half_written_is_passed_over(tmp_path: Path, rest: str) -> None:
    write(tmp_path, "a-1.jsonl", batch(1, 0, 1), rest=rest)
    assert [one.indices for one in read(tmp_path)] == [(1,)]
