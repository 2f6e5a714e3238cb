from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdrecover import cli
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest, digest
from hvdrecover.checkpoint.layout import Layout, TensorSpec, plan
from hvdrecover.checkpoint.near import digests, loans, place, recall
from hvdrecover.checkpoint.near.place import Keeper
from hvdrecover.checkpoint.near.recall import Recalled
from hvdrecover.checkpoint.near.slots import Slot
from hvdrecover.checkpoint.near.tier import NearTier
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.clock import SYSTEM_CLOCK

SIZE = 3000


def layout(size: int = SIZE) -> Layout:
    return plan([TensorSpec("w", "F64", (size,))])


class Process:
    """A process that makes commits of one tensor; the next one takes over what it leaves."""

    def __init__(self, path: Path) -> None:
        place.make(path, "file:///root")
        keeper = Keeper.take(path)
        assert keeper is not None
        self.path = path
        self.passed_over: list[str] = []
        slots = recall.found(path, self.note)
        self.recalled = recall.in_place(path, slots, lambda commit: True, self.note)
        self.decisions: list[str | None] = []
        self.tier = NearTier(keeper, self.writer, SYSTEM_CLOCK, self.decide)
        self.tier.take_over(slots)

    def writer(self) -> dict[str, Any]:
        return {"host": "h1", "rank": 0, "job": "job/start"}

    def note(self, name: str, reason: str) -> None:
        self.passed_over.append(f"{name}: {reason}")

    def decide(self, refusal: str | None, nbytes: int) -> None:
        self.decisions.append(refusal)

    def commit(
        self, number: int, size: int = SIZE, pinned: tuple[Arena, ...] = (), seal: bool = True
    ) -> Snapshot | None:
        """Make a commit whose tensor is full of its number, if there is memory for it."""
        arenas = self.tier.acquire({"model": layout(size)}, pinned)
        if arenas is None:
            return None
        arenas["model"].bytes_of("w").view(np.float64)[...] = number
        state = {"attributes": {"step": number, "model": {"w": {"$tensor": "w"}}}, "samplers": {}}
        snapshot = Snapshot(CommitId(2, number), dict(arenas), state, 2, {"fake": "1"})
        if seal:
            self.tier.seal(snapshot)
            self.settle()
        return snapshot

    def settle(self) -> None:
        assert self.tier.wait(30)

    def names(self) -> list[str]:
        return [name for name in LocalStorage(self.path).names() if CommitId.parse(name)]

    def dies(self) -> None:
        self.settle()
        self.tier.stop()


def is_lent(file: Path) -> bool:
    with file.open("r+b") as opened:
        return loans.is_locked(opened.fileno())


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield place.folder(str(tmp_path), "file:///root")


@pytest.fixture
def process(path: Path) -> Iterator[Process]:
    process = Process(path)
    assert process.commit(0) is None  # memory is asked for by the first commit
    process.settle()
    yield process
    process.tier.stop()


def values(snapshot: Snapshot) -> set[float]:
    return set(snapshot.arenas["model"].bytes_of("w").view(np.float64).tolist())


def recalled(path: Path) -> Recalled | None:
    return recall.by_copy(path, lambda commit: True, lambda name, reason: None)


def test_what_was_sealed_is_a_commit_of_the_usual_format(process: Process) -> None:
    process.commit(1)
    process.commit(2)
    assert process.decisions == [None]
    assert process.names() == ["g0002-c00000001", "g0002-c00000002"]
    snapshot = read_commit(LocalStorage(process.path), CommitId(2, 2))
    assert values(snapshot) == {2.0} and snapshot.state["attributes"]["step"] == 2


def test_the_commands_that_look_at_roots_read_it_while_it_is_kept(
    process: Process, capsys: pytest.CaptureFixture[str]
) -> None:
    process.commit(1)
    process.commit(2)

    def run(command: str, *commits: str) -> Any:
        code = cli.main([command, str(process.path), *commits, "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, listed = run("ls", "--verify")
    assert code == 0 and listed["leftovers"] == []
    assert [(each["number"], each["state"], each["intact"]) for each in listed["commits"]] == [
        (2, "complete", True),
        (1, "complete", True),
    ]
    code, shown = run("show")
    assert (code, shown["commit"], shown["attributes"]["step"]) == (0, "g0002-c00000002", 2)
    assert [each["name"] for each in shown["files"][0]["tensors"]] == ["w"]
    code, differing = run("diff", "1", "2")
    assert code == 0 and differing["objects"] == [{"path": "step", "a": "1", "b": "2"}]
    assert [(each["name"], each["elements_changed"]) for each in differing["changed"]] == [("model.w", SIZE)]
    assert run("verify")[0] == 0
    file = process.path / "g0002-c00000002" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    code, verified = run("verify")
    assert code == 1 and [each["intact"] for each in verified["commits"]] == [False, True]


def test_the_next_process_takes_the_newest_over_without_a_copy(process: Process) -> None:
    process.commit(1)
    process.commit(2)
    process.dies()
    successor = Process(process.path)
    assert successor.recalled is not None and successor.recalled.job == "job/start"
    assert successor.recalled.snapshot.id == CommitId(2, 2) and values(successor.recalled.snapshot) == {2.0}
    successor.settle()  # what is not resumed from is mapped beside training
    assert successor.tier.owns(successor.recalled.snapshot.arenas)
    assert successor.commit(3) is not None and successor.decisions == []  # no new memory
    assert successor.names() == ["g0002-c00000002", "g0002-c00000003"]
    successor.tier.stop()


def test_a_commit_that_is_being_copied_is_none(process: Process) -> None:
    process.commit(1)
    process.commit(2)
    process.commit(3, seal=False)  # killed right then
    assert process.names() == ["g0002-c00000002"]
    assert (found := recalled(process.path)) is not None and found.snapshot.id == CommitId(2, 2)


def test_a_commit_that_was_copied_is_found_before_it_is_sealed_and_not_while_it_is_overwritten(
    process: Process,
) -> None:
    process.commit(1)
    process.tier._seal_waiting = lambda: None  # type: ignore[method-assign]  # so soon is it killed
    process.tier._prepare = lambda layouts, count: None  # type: ignore[method-assign]
    for number in (2, 3):
        snapshot = process.commit(number)
        assert snapshot is not None
        arenas, found = recall.borrowed(process.path, CommitId(2, number))
        assert arenas["model"].buffer.tobytes() == snapshot.arenas["model"].buffer.tobytes()
        assert arenas["model"] is not snapshot.arenas["model"]
        assert found == {"model": digest(snapshot.arenas["model"].buffer)}
        del arenas
    assert recall.borrowed(process.path, CommitId(2, 2)) == ({}, {})  # its memory has the third by now
    process.commit(4, seal=False)  # killed while it is copied
    assert recall.borrowed(process.path, CommitId(2, 3)) == ({}, {})
    assert [slot.copied for slot in recall.found(process.path, process.note)] == [None, CommitId(2, 1)]
    assert process.names() == ["g0002-c00000001"]


def test_memory_that_another_process_has_borrowed_is_not_overwritten_until_it_lets_go(
    process: Process,
) -> None:
    process.commit(1)
    lent = process.commit(2)
    assert lent is not None
    file = process.path / "g0002-c00000002" / "model.safetensors"
    before = file.read_bytes()
    arenas, found = recall.borrowed(process.path, CommitId(2, 2))
    for number in range(3, 9):
        made = process.commit(number)
        assert made is not None and made.arenas["model"] is not lent.arenas["model"]
        assert process.names()[-1] == f"g0002-c{number:08}"
    assert arenas["model"].buffer.tobytes() == before and digest(arenas["model"].buffer) == found["model"]
    arenas["model"].buffer[:] = 0  # a mistake
    assert lent.arenas["model"].buffer.tobytes() == before
    del arenas
    after = [process.commit(number) for number in range(9, 12)]
    assert lent.arenas["model"] in [made.arenas["model"] for made in after if made is not None]


def test_memory_that_is_being_overwritten_is_not_lent_to_who_has_found_it_before(process: Process) -> None:
    process.commit(1)
    copied = process.commit(2, seal=False)
    assert copied is not None
    (file,) = process.path.glob(".hvdrecover-slot-*/model.safetensors")
    with pytest.raises(BlockingIOError):
        loans.borrowed(file, layout())
    process.tier.seal(copied)
    process.settle()
    arenas, _ = recall.borrowed(process.path, copied.id)
    assert arenas["model"].bytes_of("w").view(np.float64)[0] == 2.0


def test_who_has_borrowed_lets_go_of_it_and_none_of_its_children_does(process: Process) -> None:
    process.commit(1)
    arenas, _ = recall.borrowed(process.path, CommitId(2, 1))
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        del arenas
        os.write(writing, b"!")
        signal.pause()
    try:
        assert os.read(reading, 1) == b"!"
        (file,) = process.path.glob("g*/model.safetensors")
        assert is_lent(file)
        del arenas
        assert not is_lent(file)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_memory_of_which_nobody_can_tell_whether_it_is_lent_is_not_overwritten(
    process: Process,
) -> None:
    assert process.commit(1) is not None
    arenas, _ = recall.borrowed(process.path, CommitId(2, 1))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # as many files are open as may be
    try:
        others = [process.commit(number, seal=False) for number in (2, 3, 4)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert others == [None] * 3
    assert arenas["model"].bytes_of("w").view(np.float64)[0] == 1.0
    assert process.commit(5) is not None


def test_a_file_with_holes_is_not_borrowed(process: Process) -> None:
    process.commit(1)
    (file,) = process.path.glob("g*/model.safetensors")
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:4096])
    os.truncate(file, len(whole))
    with pytest.raises(OSError, match="holes"):
        recall.borrowed(process.path, CommitId(2, 1))
    assert not is_lent(file)


def test_the_newest_sealed_commit_is_never_overwritten(process: Process) -> None:
    process.commit(1)
    for number in range(2, 30):
        process.commit(number, seal=number % 3 == 0)
        assert (found := recalled(process.path)) is not None
        assert values(found.snapshot) == {float(found.snapshot.id.commit)}
        assert found.snapshot.id.commit >= number - 2


def test_what_is_being_written_elsewhere_is_not_overwritten_and_gets_a_third(process: Process) -> None:
    first = process.commit(1)
    assert first is not None
    pinned = tuple(first.arenas.values())
    for number in range(2, 12):
        process.commit(number, pinned=pinned)
        process.settle()
    assert values(first) == {1.0}
    assert (found := recalled(process.path)) is not None and found.snapshot.id.commit >= 10
    assert len(list(place.leftovers(process.path))) <= 3  # slots


def test_of_three_slots_two_hold_a_sealed_commit_and_the_third_is_memory_for_the_next(
    process: Process,
) -> None:
    first = process.commit(1)
    assert first is not None
    for number in range(2, 6):
        process.commit(number, pinned=tuple(first.arenas.values()))
        process.settle()
    for number in range(6, 12):
        process.commit(number)
        assert process.names() == [f"g0002-c{each:08}" for each in (number - 1, number)]
        assert len(list(process.path.glob(f"{place.SLOT}*/*.safetensors"))) == 1


def test_until_the_third_is_made_an_older_commit_that_is_being_written_vouches_for_the_newest(
    process: Process,
) -> None:
    first = process.commit(1)
    assert first is not None and process.commit(2) is not None
    process.tier._prepare = lambda layouts, count: None  # type: ignore[method-assign]
    assert process.commit(3, pinned=tuple(first.arenas.values()), seal=False) is not None
    assert (found := recalled(process.path)) is not None and values(found.snapshot) == {1.0}


def test_a_broken_commit_is_passed_over_for_the_one_before(process: Process) -> None:
    process.commit(1)
    process.commit(2)
    process.dies()
    file = process.path / "g0002-c00000002" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"x")
    assert (found := recalled(process.path)) is not None and found.snapshot.id == CommitId(2, 1)
    successor = Process(process.path)
    assert successor.recalled is not None and successor.recalled.snapshot.id == CommitId(2, 1)
    assert "digest" in successor.passed_over[0]
    assert successor.names() == ["g0002-c00000001"]  # and the memory of the other is used again
    successor.tier.stop()


def test_of_what_another_user_has_left_the_newest_is_named_and_not_used(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.commit(1)
    process.commit(2)
    user = os.getuid()
    mine = process.path.parent.with_name(f"hvdrecover-{user + 1}") / process.path.name
    recall.pass_over_others(process.path, lambda commit: True, process.note)
    assert process.passed_over == []
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    recall.pass_over_others(mine, lambda commit: commit.commit < 2, process.note)
    recall.pass_over_others(mine, lambda commit: commit.commit < 1, process.note)
    (passed_over,) = process.passed_over
    assert passed_over.startswith("g0002-c00000001: ") and str(process.path) in passed_over
    process.path.parent.rename(process.path.parent.with_name("hvdrecover-x"))  # nobody's
    recall.pass_over_others(mine, lambda commit: True, process.note)
    assert len(process.passed_over) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda commit: (commit / "MANIFEST.json").unlink(),
        lambda commit: (commit / "MANIFEST.json").write_text("{"),
        lambda commit: (commit / "model.safetensors").unlink(),
        lambda commit: os.truncate(commit / "model.safetensors", 100),
        lambda commit: (commit / "model.safetensors").write_bytes(b""),
        lambda commit: (commit / "model.safetensors").write_bytes(b"\0" * 64),
    ],
    ids=["no manifest", "half a manifest", "no file", "half a file", "empty", "nonsense"],
)
def test_what_is_torn_is_never_used_and_never_fatal(process: Process, damage: Callable[[Path], None]) -> None:
    process.commit(1)
    process.dies()
    damage(process.path / "g0002-c00000001")
    assert recalled(process.path) is None
    successor = Process(process.path)
    assert successor.recalled is None
    for number in (5, 6, 7):  # memory is made where it is not left
        successor.commit(number)
        successor.settle()
    assert (found := recalled(process.path)) is not None and values(found.snapshot) == {7.0}
    successor.tier.stop()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


class Gate:
    """Keeps the thread that computes digests at the first piece of a commit, once it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.reached, self.opened = threading.Event(), threading.Event()
        gate = self

        class Slow(Digest):
            def update(self, piece: Any) -> None:
                super().update(piece)
                gate.threads.append(threading.current_thread().name)
                gate.reached.set()
                assert gate.opened.wait(30)

        self.close = lambda: monkeypatch.setattr(digests, "Digest", Slow)
        for name, value in {"_PIECE": 1 << 12, "_WORTH_A_THREAD": 1 << 12, "_PATIENCE": 60.0}.items():
            monkeypatch.setattr(digests, name, value)


def test_a_commit_that_is_being_written_and_sealed_lets_the_newest_sealed_one_go(
    process: Process, gate: Gate
) -> None:
    process.commit(1)
    gate.close()
    second = process.commit(2, seal=False)
    assert second is not None
    process.tier.seal(second)
    assert gate.reached.wait(30)
    assert process.commit(3, pinned=tuple(second.arenas.values()), seal=False) is not None
    assert process.names() == []
    gate.opened.set()
    process.settle()
    assert process.names() == ["g0002-c00000002"]


def test_a_commit_that_is_being_sealed_is_hurried_when_the_next_one_comes(
    process: Process, gate: Gate
) -> None:
    gate.close()
    snapshot = process.commit(1, seal=False)
    assert snapshot is not None
    process.tier.seal(snapshot)
    assert gate.reached.wait(30)
    assert process.commit(2, seal=False) is not None
    gate.opened.set()
    done = threading.Event()
    process.tier._do(done.set)  # not `wait`, which is in haste itself
    assert done.wait(30)
    pieces = -(-snapshot.nbytes // (1 << 12))
    assert gate.threads == ["hvdrecover-near-digest"] + ["hvdrecover-near"] * (pieces - 1)
    assert process.names() == ["g0002-c00000001"]


def test_a_slot_that_was_being_made_is_cleared_away_without_a_word(process: Process) -> None:
    process.commit(1)
    process.dies()
    partly = process.path / f"{place.SLOT}0123"
    partly.mkdir()
    (partly / "model.safetensors").write_bytes(b"")
    successor = Process(process.path)
    assert successor.recalled is not None and successor.passed_over == [] and not partly.exists()
    successor.tier.stop()


def test_commits_that_are_sealed_again_after_a_failure_are_reported(process: Process) -> None:
    process.commit(1)
    shutil.rmtree(process.path / "g0002-c00000001")
    process.path.rename(aside := process.path.with_name("aside"))
    process.commit(2)
    process.commit(3)
    aside.rename(process.path)
    process.commit(4)
    assert [decision is None for decision in process.decisions] == [True, False, False, True]


def test_a_state_of_another_size_gets_new_memory_and_the_last_commit_stays(
    process: Process,
) -> None:
    process.commit(1)
    assert process.commit(2, size=SIZE * 2) is None
    process.settle()
    assert process.names() == ["g0002-c00000001"]
    process.commit(3, size=SIZE * 2)
    assert process.names() == ["g0002-c00000003"]
    assert (found := recalled(process.path)) is not None and values(found.snapshot) == {3.0}


def test_a_commit_with_the_same_tensors_takes_the_place_of_the_one_before(process: Process) -> None:
    snapshot = process.commit(1)
    assert snapshot is not None
    process.tier.seal(Snapshot(CommitId(3, 2), snapshot.arenas, {"attributes": {}}, 2, {}))
    process.settle()
    assert process.names() == ["g0003-c00000002"]


def test_a_process_killed_while_it_seals_a_commit_anew_leaves_it_sealed(process: Process) -> None:
    snapshot = process.commit(1)
    assert snapshot is not None
    process.dies()
    if (child := os.fork()) == 0:
        successor = Process(process.path)
        assert successor.recalled is not None
        Slot._rename = lambda slot, path: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        successor.tier.seal(dataclasses.replace(successor.recalled.snapshot, id=CommitId(3, 1)))
        successor.settle()
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    last = Process(process.path)
    assert last.passed_over == [] and last.recalled is not None
    assert last.recalled.snapshot.id == CommitId(3, 1) and values(last.recalled.snapshot) == {1.0}
    last.tier.stop()


def test_a_commit_that_could_not_be_sealed_anew_stays_sealed(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = process.commit(1)
    assert snapshot is not None

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        process.tier.seal(dataclasses.replace(snapshot, id=CommitId(3, 1)))
        process.settle()
        for number in (2, 3):
            process.commit(number)
    assert (found := recalled(process.path)) is not None and values(found.snapshot) == {1.0}


def test_one_process_keeps_a_near_root(process: Process) -> None:
    assert Keeper.take(process.path) is None
    assert [each.in_use for each in place.roots(str(process.path.parent.parent))] == [True]
    process.tier.remove()
    assert not process.path.exists() and not process.path.parent.exists()


def test_a_slot_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    with suppress(OSError):
        Slot.make(tmp_path, {"model": plan([TensorSpec("w", "F64", (1 << 46,))])})
    assert list(tmp_path.iterdir()) == []


def test_memory_that_a_writer_may_read_for_ever_is_given_up_and_replaced(process: Process) -> None:
    for number in range(1, 20, 3):
        snapshot = process.commit(number)
        assert snapshot is not None
        process.tier.give_up(snapshot.arenas)
        for more in (1, 2):
            process.commit(number + more)
            process.settle()
        assert values(snapshot) == {float(number)}
        assert (found := recalled(process.path)) is not None
        assert found.snapshot.id.commit >= number
    assert len(list(process.path.glob("*/*.safetensors"))) <= 4


def test_a_state_that_grows_with_each_commit_ends_the_allocations_and_says_so(process: Process) -> None:
    for number in range(30):
        process.commit(number, size=SIZE + number)
        process.settle()
    assert process.decisions[-1] == "the tensors were others at 10 commits in a row"
    assert len(process.decisions) < 15


def test_memory_that_others_need_is_given_back(process: Process) -> None:
    assert process.commit(1) is not None
    process.tier._reserve = 1 << 62
    last = process.commit(2)
    assert last is not None and "given back" in str(process.decisions[-1])
    assert list(process.path.glob("*/*")) == []
    assert (
        process.commit(3) is None
    )  # it goes to private memory, and what is mapped yet is not taken for that
    assert values(last) == {2.0} and process.tier.owns(last.arenas)


def test_an_error_of_who_is_told_does_not_end_the_thread(path: Path) -> None:
    process = Process(path)

    def fails(refusal: str | None, nbytes: int) -> None:
        raise RuntimeError("nobody listens")

    process.tier._decided = fails
    process.commit(1)
    process.settle()
    process.commit(2)
    assert process.names() == ["g0002-c00000002"]
    process.tier.stop()
