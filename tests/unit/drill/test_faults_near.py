from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hvdrecover.checkpoint.near import place, recall
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.faults import near as faults
from hvdrecover.errors import DrillError
from tests.unit.checkpoint.roots import make_snapshot, make_store
from tests.unit.drill.drilled import Counting

ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a file system")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    monkeypatch.setenv("HVDRECOVER_NEAR", str(tmp_path / "near"))
    with ExitStack() as stack:
        yield Counting(tmp_path, stack)


def near_commits(run: Counting, count: int, url: str = "") -> Path:
    """Make commits at the near root of a run, or of another URL."""
    name = url or place.named(str(run.root))
    path = place.folder(os.environ["HVDRECOVER_NEAR"], name)
    place.make(path, name)
    written = run.folder / f"written-{path.name}"
    store = make_store(LocalStorage(written))
    store.claim_next()
    for number in range(1, count + 1):
        store.write(make_snapshot(1, number), rank=0)
    for commit in written.glob("g*"):
        shutil.copytree(commit, path / commit.name)
    return path


def killed(run: Counting) -> None:
    assert [run.children[name].wait(60) for name in "01"] == [-signal.SIGKILL] * 2
    assert run.alive() == ["supervisor", "launcher"]


@pytest.mark.parametrize("protocol", ["", "hvdrecover-drill://"])
def test_the_newest_near_commit_is_damaged_and_the_one_before_is_recalled(
    run: Counting, protocol: str
) -> None:
    path = near_commits(run, 2, protocol and f"{protocol}{run.root}")
    FAULTS["corrupt-near"].strike(run, 0)
    killed(run)
    passed_over: list[str] = []
    note = lambda name, reason: passed_over.append(name)  # noqa: E731
    found = recall.in_place(path, recall.found(path, note), lambda commit: True, note)
    assert found is not None and found.snapshot.id.commit == 1
    assert passed_over == ["g0001-c00000002"]


def test_commits_of_other_jobs_on_the_host_are_not_damaged(
    run: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    near_commits(run, 1, f"file://{run.folder}/other")
    monkeypatch.setattr(faults, "_A_COMMIT", 0.0)
    with pytest.raises(DrillError, match=f"^{run.folder}: 'corrupt-near' "):
        FAULTS["corrupt-near"].strike(run, 0)
    assert run.alive() == list(run.children)


def test_what_a_killed_run_leaves_is_forgotten_and_nothing_else(run: Counting) -> None:
    mine, other = near_commits(run, 1), near_commits(run, 1, f"file://{run.folder}/other")
    faults.forget(run)
    assert (mine.exists(), other.exists()) == (False, True)


@ONLY_ROOT
def test_the_file_system_is_full_and_then_it_is_not(run: Counting) -> None:
    fault = FAULTS["tmpfs-full"]
    try:
        folder = Path(fault.prepare(run)["HVDRECOVER_NEAR"])
    except DrillError as error:
        pytest.skip(str(error))
    try:
        assert folder.is_mount() and fault.prepare(run)  # a start after the first one
        (folder / "some").write_bytes(bytes(10_000))
        fault.strike(run, 0)
        killed(run)
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_bytes(bytes(10_000))
        fault.end(run)
        (folder / "more").write_bytes(bytes(10_000))
    finally:
        fault.clean_up(run)
    assert not folder.is_mount()
    fault.end(run)
    fault.clean_up(run)
