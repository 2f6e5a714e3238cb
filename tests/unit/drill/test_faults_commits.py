from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import catalog
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.faults import commits as faults
from hvdrecover.errors import DrillError
from tests.unit.checkpoint.roots import assert_is, make_snapshot, make_store
from tests.unit.drill.drilled import Counting


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path, stack)


def commits(run: Counting, count: int) -> None:
    store = make_store(open_storage(str(run.root)))
    store.claim_next()
    for number in range(1, count + 1):
        store.write(make_snapshot(1, number), rank=0)


def newest(run: Counting) -> object:
    return load_newest(make_store(open_storage(str(run.root))))


def test_the_newest_commit_is_damaged_and_the_one_before_is_loaded(run: Counting) -> None:
    commits(run, 3)
    FAULTS["corrupt-commit"].strike(run, 0)
    assert [run.children[name].wait(60) for name in "01"] == [-signal.SIGKILL] * 2
    assert run.alive() == ["supervisor", "launcher"]
    assert_is(newest(run), make_snapshot(1, 2))
    entries = {each.id.name: each for each in catalog.entries(open_storage(str(run.root)))}
    damaged = entries["g0001-c00000003"]
    assert (damaged.state, "digest" in (damaged.reason or "")) == ("quarantined", True)
    assert faults.damaged(run) == {"g0001-c00000003"}


def test_a_commit_that_is_damaged_already_is_none_to_damage(run: Counting) -> None:
    commits(run, 3)
    assert faults.spoil_newest(run) == CommitId(1, 3)
    newest(run)
    assert faults.spoil_newest(run) == CommitId(1, 2)
    assert faults.damaged(run) == {"g0001-c00000003", "g0001-c00000002"}
    assert_is(newest(run), make_snapshot(1, 1))


def test_a_commit_that_is_being_written_is_none_to_damage(run: Counting) -> None:
    commits(run, 2)
    open_storage(str(run.root)).publish("g0001-c00000003/model.safetensors", b"half of it")
    assert faults.spoil_newest(run) == CommitId(1, 2)
    assert_is(newest(run), make_snapshot(1, 1))


def test_the_only_commit_is_not_damaged(run: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    commits(run, 1)
    monkeypatch.setattr(faults, "_TWO_COMMITS", 0.0)
    with pytest.raises(DrillError, match=rf"^{run.folder}: .*'corrupt-commit' .*\(keep=2\)"):
        FAULTS["corrupt-commit"].strike(run, 0)
    assert run.alive() == list(run.children)
    assert_is(newest(run), make_snapshot(1, 1))
    assert faults.damaged(run) == set()
