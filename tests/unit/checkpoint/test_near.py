"""The near tier: its commits, and whose its folder is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint import CommitId, near_tier
from hvdrecover.checkpoint.arena import Arena, Layout, TensorSpec, plan
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.near_tier import Keeper, NearTier, mapped
from hvdrecover.checkpoint.root import Load, copied, read_commit, read_newest
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.errors import NoUsableCommitError, StorageError
from hvdrecover.machine import SYSTEM_CLOCK
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import flip

SIZE = 3000


def layout(size: int = SIZE) -> Layout:
    return plan([TensorSpec("w", "F64", (size,))])


class Process:
    """A process that makes commits of one tensor; the next one takes over what it leaves."""

    def __init__(self, path: Path) -> None:
        near_tier.make(path, "file:///root")
        keeper = Keeper.take(path)
        assert keeper is not None
        self.path = path
        self.recalled = recalled(path, mapped)
        self.unsealed = near_tier.unsealed(path, {"model": layout()})
        found = {} if self.recalled is None else {self.recalled.id.name: self.recalled.arenas}
        found.update([] if self.unsealed is None else [self.unsealed])
        self.decisions: list[str | None] = []
        self.tier = NearTier(keeper, found, SYSTEM_CLOCK, lambda refusal, _: self.decisions.append(refusal))
        self.tier.begin({"host": "h1", "rank": 0, "job": "job/start"})

    def commit(
        self, number: int, size: int = SIZE, pinned: tuple[Arena, ...] = (), seal: bool = True
    ) -> Snapshot | None:
        """Make a commit whose tensor is full of its number, if there is memory for it."""
        layouts = {"model": layout(size)}
        if (arenas := self.tier.acquire(layouts, set(pinned))) is None:
            self.settle()  # the tier's thread makes the memory
            arenas = self.tier.acquire(layouts, set(pinned))
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
        self.tier.keeper.release()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield near_tier.folder(str(tmp_path), "file:///root")


@pytest.fixture
def process(path: Path) -> Iterator[Process]:
    process = Process(path)
    yield process
    process.tier.keeper.release()


def values(snapshot: Snapshot) -> set[float]:
    return set(snapshot.arenas["model"].bytes_of("w").view(np.float64).tolist())


def recalled(path: Path, load: Load = copied) -> Snapshot | None:
    """The newest commit that can be read: by a process beside the keeper, or by the next one."""
    try:
        return read_newest(LocalStorage(path), lambda *skipped: None, clock=FakeClock(), load=load)
    except NoUsableCommitError:
        return None


def test_what_was_sealed_is_a_commit_of_the_usual_format(process: Process) -> None:
    process.commit(1)
    process.commit(2)
    assert set(process.decisions) == {None}
    assert process.names() == ["g0002-c00000001", "g0002-c00000002"]
    snapshot = read_commit(LocalStorage(process.path), CommitId(2, 2))
    assert values(snapshot) == {2.0} and snapshot.state["attributes"]["step"] == 2


@pytest.mark.parametrize("small", [True, False])
def test_only_a_small_first_commit_waits_for_its_memory(
    process: Process, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if not small:
        monkeypatch.setattr(near_tier, "_SMALL", 0)
    assert (process.tier.acquire({"model": layout()}, set()) is not None) == small
    process.settle()
    assert process.tier.acquire({"model": layout()}, set()) is not None


def test_a_commit_that_is_sealed_again_stays_the_newest(process: Process) -> None:
    snapshot = process.commit(1)
    assert snapshot is not None
    process.tier.seal(snapshot)
    process.settle()
    assert process.names() == ["g0002-c00000001"]
    assert (newest := process.tier.newest()) is not None and newest.id == snapshot.id


def test_a_sealed_commit_that_is_to_be_sealed_again_outlives_the_next_offer(process: Process) -> None:
    snapshot = process.commit(1)
    assert snapshot is not None
    with process.tier._changed:  # the tier's thread is busy
        process.tier.seal(replace(snapshot, id=CommitId(2, 2)))
        process.commit(3)
    assert process.names() == ["g0002-c00000001", "g0002-c00000003"]


def test_a_kill_in_a_seal_spares_the_commit_before(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    process.commit(1)
    snapshot = process.commit(2)
    assert snapshot is not None
    monkeypatch.delattr(near_tier.Buffer, "seal")
    process.tier.seal(replace(snapshot, id=CommitId(2, 3)))
    process.settle()
    assert process.names()[0] == "g0002-c00000001"


def test_a_state_that_grows_gets_memory_of_its_new_size(process: Process) -> None:
    process.commit(1, size=10)
    for number in range(2, 6):
        process.commit(number)
    assert process.names() == ["g0002-c00000004", "g0002-c00000005"]
    assert {each.stat().st_size for each in process.path.rglob("*.safetensors")} == {layout().nbytes}


def test_the_next_process_takes_the_newest_over_without_a_copy(process: Process) -> None:
    process.commit(1)
    process.commit(2)
    process.dies()
    successor = Process(process.path)
    assert successor.recalled is not None and successor.recalled.job == "job/start"
    assert successor.recalled.id == CommitId(2, 2) and values(successor.recalled) == {2.0}
    files = {each.stat().st_ino for each in process.path.rglob("*.safetensors")}
    assert successor.commit(3) is not None
    assert {each.stat().st_ino for each in process.path.rglob("*.safetensors")} == files  # no new memory
    assert successor.names() == ["g0002-c00000002", "g0002-c00000003"]
    successor.tier.keeper.release()


def test_the_next_process_seals_what_was_copied_last_without_a_copy(process: Process) -> None:
    for number in (1, 2, 3):
        process.commit(number, seal=number < 3)
    process.dies()
    (unsealed,) = process.path.glob(f"{near_tier.BUFFER}*")
    older = shutil.copytree(unsealed, unsealed.with_name(f"{near_tier.BUFFER}zzz"))
    os.utime(older / "model.safetensors", (0, 0))
    with (unsealed / "model.safetensors").open("r+b") as file:
        file.write(bytes(4096))  # as of a process that was killed while it made the buffer
    successor = Process(process.path)
    assert successor.unsealed is not None
    folder, arenas = successor.unsealed
    assert folder == unsealed.name
    snapshot = Snapshot(CommitId(3, 3), arenas, {"attributes": {}, "samplers": {}}, 2, {"fake": "1"})
    assert values(snapshot) == {3.0}
    successor.tier.seal(snapshot)
    successor.settle()
    assert (found := recalled(process.path)) is not None and found.id == CommitId(3, 3)
    assert near_tier.unsealed(process.path, {"model": layout(SIZE + 1)}) is None
    successor.tier.keeper.release()


def test_the_newest_sealed_commit_is_never_overwritten(process: Process) -> None:
    process.commit(1)
    for number in range(2, 30):
        process.commit(number, seal=number % 3 == 0)
        assert (found := recalled(process.path)) is not None
        assert values(found) == {float(found.id.commit)}
        assert found.id.commit >= number - 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda commit: (commit / "MANIFEST.json").unlink(),
        lambda commit: (commit / "MANIFEST.json").write_text("{"),
        lambda commit: (commit / "model.safetensors").unlink(),
        lambda commit: os.truncate(commit / "model.safetensors", 100),
        lambda commit: (commit / "model.safetensors").write_bytes(b""),
        lambda commit: (commit / "model.safetensors").write_bytes(b"\0" * 64),
        lambda commit: flip(LocalStorage(commit), "model.safetensors"),
    ],
    ids=["no manifest", "half a manifest", "no file", "half a file", "empty", "nonsense", "a flipped bit"],
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
    assert (found := recalled(process.path)) is not None and values(found) == {7.0}
    successor.tier.keeper.release()


def test_a_commit_that_does_not_fit_leaves_nothing(process: Process) -> None:
    assert process.commit(1, size=1 << 46) is None
    assert "3 commits of" in str(process.decisions[0])
    assert {each.name for each in process.path.iterdir()} == {"root.json", "lock"}


# -- whose a near root is ----------------------------------------------------------------------------------

KEEP = "import sys, pathlib; from hvdrecover.checkpoint.near_tier import Keeper; "
KEEP += "k = Keeper.take(pathlib.Path(sys.argv[1])); print(k is not None, flush=True); sys.stdin.read()"


@pytest.fixture
def kept(path: Path) -> Path:
    """A near root with a file of 5000 bytes."""
    near_tier.make(path, "file:///root")
    (path / "data").write_bytes(b"x" * 5000)
    return path


def test_a_folder_has_one_name_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/tmp")
    ways = ["~/r", "file:~/r", "/tmp/r", "file:/tmp/r", "local:/tmp/r", "file:///tmp/r"]
    assert {near_tier.named(each) for each in ways} == {"file:///tmp/r"}
    assert near_tier.base("~/near") == near_tier.base("/tmp/near")


def test_a_near_root_is_private_and_says_whose_it_is(tmp_path: Path, kept: Path) -> None:
    assert kept.stat().st_mode & 0o777 == kept.parent.stat().st_mode & 0o777 == 0o700
    (seen,) = near_tier.roots(str(tmp_path))
    assert (seen.path, seen.url, seen.in_use) == (kept, "file:///root", False)
    assert seen.nbytes >= 5000


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, kept: Path) -> None:
    kept.parent.chmod(0o777)
    with pytest.raises(StorageError) as caught:
        near_tier.make(kept, "file:///root")
    assert caught.value.url == str(kept.parent)
    with pytest.raises(StorageError):
        near_tier.roots(str(tmp_path))


def test_what_another_process_keeps_is_in_use_until_that_ends(tmp_path: Path, kept: Path) -> None:
    command = [sys.executable, "-c", KEEP, str(kept)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"True\n"
        assert near_tier.roots(str(tmp_path))[0].in_use
        assert Keeper.take(kept) is None and not near_tier.remove(kept)
        assert kept.is_dir()
        other.kill()
    assert not near_tier.roots(str(tmp_path))[0].in_use
    assert near_tier.remove(kept)
    assert not kept.parent.exists()


def test_looking_does_not_lose_this_processs_own_lock(tmp_path: Path, kept: Path) -> None:
    keeper = Keeper.take(kept)
    assert keeper is not None and near_tier.roots(str(tmp_path))[0].in_use
    command = [sys.executable, "-c", KEEP, str(kept)]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).stdout == b"False\n"
    keeper.release()
    again = Keeper.take(kept)
    assert again is not None
    again.release()


def test_a_root_whose_owner_is_unreadable_is_still_listed(tmp_path: Path, kept: Path) -> None:
    (kept / "root.json").write_text("[1")
    assert near_tier.roots(str(tmp_path))[0].url == ""
