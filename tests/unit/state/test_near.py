"""The near tier in jobs whose ranks are threads: what a process recalls that starts anew."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover import error_kinds
from hvdrecover.checkpoint import Checkpoint, CommitId, near_tier
from hvdrecover.checkpoint.near_tier import Keeper
from hvdrecover.checkpoint.root import commits, read_commit
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.errors import EmptiedRootError, StoppedError
from hvdrecover.guard import Guard
from hvdrecover.guard.numbers import RolledBack
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoots
from tests.unit.state.jobs import CONFIG, URL, Process, on_ranks


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path


def made(process: Process, near: Path, *, guard: Guard | None = None) -> State:
    config = dataclasses.replace(CONFIG, job="a" * 32, local_rank=process.world.rank())
    settings = Checkpoint(URL, every_commits=1000, near=str(near))
    return process.state(settings, config=config, guard=guard, model=FakeModel(w=[1.0, 2.0]), step=0)


def train(state: State, steps: int) -> None:
    for _ in range(steps):
        state.step += 1
        state.model.weights["w"][:] = [state.step, -state.step]
        state.commit()
        state._session.durable.near.settle(30)


def dies(state: State) -> None:
    """Leave what a killed process leaves: its lock is gone, its commits are there."""
    state._session.durable.near.settle(30)
    state._session.durable.retire()
    if state._session.memory.arenas.near is not None:
        state._session.memory.arenas.near.keeper.release()


def job(near: Path, steps: int) -> list[tuple[Any, CommitId, list[float]]]:
    """Run a job of two ranks that is killed after so many steps; return what it began with."""

    def body(process: Process) -> Any:
        state = made(process, near)
        state.sync()
        began = (state.step, state.last_commit, state.model.weights["w"].tolist())
        train(state, steps)
        dies(state)
        return began

    return on_ranks(2, body)


def test_a_root_that_was_emptied_or_unmounted_costs_no_near_commit(near: Path, roots: FakeRoots) -> None:
    job(near, 5)
    before, mounted = sealed(near), roots.by_url.pop(URL)

    def body(process: Process) -> Any:
        with pytest.raises((EmptiedRootError, StoppedError)) as error:
            made(process, near).sync()
        told = str(error.value)
        remedies = [str(near_tier.folder(str(near), URL)), "HVDRECOVER_NEAR=FOLDER"]
        return error_kinds.kinds(error.value)[0], all(remedy in told for remedy in remedies)

    assert on_ranks(2, body) == [("EmptiedRootError", True)] * 2
    assert sealed(near) == before and roots[URL].files == {}
    roots.by_url[URL] = mounted
    assert [began[0] for began in job(near, 2)] == [5, 5]
    del roots.by_url[URL]  # on purpose, and with what the error names
    shutil.rmtree(near_tier.folder(str(near), URL))
    assert [began[0] for began in job(near, 0)] == [0, 0]


@pytest.mark.parametrize("damaged", ["g0001-c00000005", "g"], ids=["the newest", "all"])
def test_a_near_commit_is_used_if_newer_ones_are_damaged(near: Path, roots: FakeRoots, damaged: str) -> None:
    def body(process: Process) -> None:
        state = made(process, near)
        state.sync()
        for steps in (3, 2):
            train(state, steps)
            state.flush()
        dies(state)

    on_ranks(2, body)
    unseal(near, CommitId(1, 5))
    for path, data in roots[URL].files.items():
        if path.startswith(damaged) and path.endswith("model.safetensors"):
            roots[URL].files[path] = data[:-1] + bytes([data[-1] ^ 0x80])
    assert [began[0] for began in job(near, 0)] == [4, 4]


def replaced(process: Process, near: Path, lost: int, leaves: Callable[[CommitId], object]) -> State:
    """Train four steps, lose a rank, which ``leaves`` something, and meet the process in its place."""
    state = made(process, near)
    state.sync()
    train(state, 4)
    process.world.allgather([1], "all commits are sealed")
    if process.world.rank() == lost:
        dies(state)
        leaves(state.last_commit)
    process.world.shutdown()
    process.world.init()
    return made(process, near) if process.world.rank() == lost else state


@pytest.mark.parametrize(("lost", "is_sealed"), [(0, True), (0, False), (1, True)])
def test_a_process_that_is_restarted_takes_the_commit_from_its_hosts_memory(
    near: Path, lost: int, is_sealed: bool
) -> None:
    """Rank 0 keeps the near tier, rank 1 reads its sealed commits."""

    def body(process: Process) -> Any:
        state = replaced(process, near, lost, lambda last: is_sealed or unseal(near, last))
        sent, broadcast = [], process.world.broadcast

        def noting(buffer: Any, root: int, name: str) -> None:
            sent.append(name)
            broadcast(buffer, root, name)

        process.world.broadcast = noting  # type: ignore[method-assign]
        state.sync()
        began = (state.step, state.last_commit, state.model.weights["w"].tolist())
        dies(state)
        return began, [name for name in sent if "snapshot" in name]

    assert on_ranks(2, body) == [((4, CommitId(2, 4), [4.0, -4.0]), [])] * 2


def test_a_second_fault_while_unsealed_files_are_filled_costs_nothing(near: Path) -> None:
    def leave_zeros(last: CommitId) -> None:  # of a process that has only made the buffer
        file = unseal(near, last) / "model.safetensors"
        file.write_bytes(bytes(file.stat().st_size))

    def failing(buffer: Any, root: int, name: str) -> None:
        raise HorovodInternalError(name)

    def body(process: Process) -> Any:
        state, broadcast = replaced(process, near, 0, leave_zeros), process.world.broadcast
        process.world.broadcast = failing  # type: ignore[method-assign]
        with pytest.raises(HorovodInternalError, match="snapshot"):
            state.sync()
        process.world.broadcast = broadcast  # type: ignore[method-assign]
        process.world.shutdown()
        process.world.init()
        state.sync()
        began = (state.step, state.model.weights["w"].tolist())
        train(state, 2)
        dies(state)
        return began

    assert on_ranks(2, body) == [(4, [4.0, -4.0])] * 2
    root = LocalStorage(near_tier.folder(str(near), URL))
    found = [read_commit(root, commit).arenas["model"].bytes_of("w") for commit in commits(root)]
    assert [weights.view("<f8").tolist() for weights in found] == [[6.0, -6.0], [5.0, -5.0]]


def test_a_lock_that_a_dying_process_releases_late_spoils_no_commit(
    near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(near, 3)
    take, calls = Keeper.take, []

    def late(path: Path) -> Keeper | None:
        calls.append(path)
        return None if len(calls) == 1 else take(path)

    monkeypatch.setattr(Keeper, "take", late)
    assert [began[0] for began in job(near, 4)] == [3, 3]
    assert len(calls) > 1
    root = LocalStorage(near_tier.folder(str(near), URL))
    assert [read_commit(root, commit).id for commit in commits(root)] == [CommitId(2, 7), CommitId(2, 6)]
    assert [began[0] for began in job(near, 0)] == [7, 7]


def test_a_finished_job_leaves_nothing(near: Path) -> None:
    def body(process: Process) -> None:
        state = made(process, near)
        state.sync()
        train(state, 2)
        state.finish()

    on_ranks(2, body)
    assert list(near.iterdir()) == []


def test_commits_with_bad_numbers_are_not_sealed(near: Path) -> None:
    def body(process: Process) -> None:
        state = made(process, near, guard=Guard(numerics="skip"))
        state.sync()
        train(state, 2)
        state.step += 1
        state.model.weights["w"][0] = float("nan")
        with pytest.raises(RolledBack):
            state.commit()
        dies(state)

    on_ranks(2, body)
    assert [began[0] for began in job(near, 0)] == [2, 2]


def unseal(near: Path, commit: CommitId) -> Path:
    (folder,) = near.glob(f"*/*/{commit.name}")
    (folder / "MANIFEST.json").unlink()
    return folder.rename(folder.with_name(f"{near_tier.BUFFER}unsealed"))


def sealed(near: Path) -> list[str]:
    """The names of the near commits, oldest first."""
    return sorted(path.parent.name for path in near.glob("*/*/g*/MANIFEST.json"))
