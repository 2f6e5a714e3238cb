"""The storage that a drill rules; that it is a storage as any other, the contract tests show."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint.storage import Storage, open_storage
from hvdrecover.drill import storage
from hvdrecover.drill.storage import DrillFileSystem, Mood
from hvdrecover.errors import StorageError
from tests.fakes.clock import FakeClock
from tests.unit.processes import answer

FULL = (errno.ENOSPC, "No space left on device")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def opened(root: Path) -> Storage:
    opened = open_storage(storage.url(root))
    opened.publish("old", b"content")
    return opened


def data(nbytes: int = 5) -> np.ndarray:
    return np.ones(nbytes, dtype=np.uint8)


def outcomes(filesystem: DrillFileSystem, path: Path, calls: int) -> list[bool]:
    """Return which of some calls go through."""
    done = []
    for _ in range(calls):
        try:
            filesystem.info(str(path))
            done.append(True)
        except ConnectionError:
            done.append(False)
    return done


def test_a_fresh_process_opens_the_url(root: Path) -> None:
    open_storage(storage.url(root)).publish("a", b"x")
    code = f"import fsspec; print(fsspec.filesystem('{storage.PROTOCOL}', root='{root}').cat('{root}/a'))"
    assert answer(code) == "b'x'"


def test_another_process_sees_the_mood(opened: Storage, root: Path) -> None:
    storage.set_mood(root, Mood(away=True))
    code = (
        "from hvdrecover.checkpoint.storage import open_storage\n"
        f"try: open_storage('{storage.url(root)}').names()\n"
        "except OSError as error: print(error)"
    )
    assert "the storage is away" in answer(code)


def test_its_files_are_those_of_the_folder(opened: Storage, root: Path) -> None:
    opened.write("folder/file", data())
    assert (root / "old").read_bytes() == b"content"
    assert open_storage(str(root)).names("folder") == ["file"]


def test_a_full_one_can_be_read_and_tidied_up_and_nothing_else(opened: Storage, root: Path) -> None:
    opened.publish("other", b"")
    storage.set_mood(root, Mood(full=True))
    for write in (
        lambda: opened.write("new", data()),
        lambda: opened.publish("new", b"x"),
        lambda: opened.create("new", b"x"),
    ):
        with pytest.raises(StorageError, match=FULL[1]) as caught:
            write()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == FULL[0]
    assert (opened.read("old"), opened.names()) == (b"content", ["old", "other"])
    opened.remove("other")
    storage.set_mood(root, Mood())
    opened.publish("new", b"x")
    assert opened.names() == ["new", "old"]


@pytest.mark.parametrize("mood", [Mood(away=True), Mood(full=True), Mood(flaky=1.0)])
def test_a_file_that_is_being_written_fails_with_the_storage(opened: Storage, root: Path, mood: Mood) -> None:
    filesystem = DrillFileSystem(str(root), skip_instance_cache=True)
    with filesystem.open(str(root / "file"), "wb") as file:
        file.write(b"1")
        storage.set_mood(root, mood)
        with pytest.raises(OSError):
            file.write(b"2")
        storage.set_mood(root, Mood())
        file.write(b"3")
    assert (root / "file").read_bytes() == b"13"


def test_a_publication_that_fails_leaves_what_was_there_and_nothing_else(opened: Storage, root: Path) -> None:
    (root / "folder").mkdir()
    with pytest.raises(StorageError):
        opened.publish("folder", b"x")  # can't take a folder's place
    assert sorted(path.name for path in root.iterdir()) == ["folder", "old"]


def test_a_slow_one_takes_its_time(opened: Storage, root: Path) -> None:
    clock = FakeClock()
    filesystem = DrillFileSystem(str(root), clock=clock, skip_instance_cache=True)
    storage.set_mood(root, Mood(slow=3.0))
    filesystem.info(str(root / "old"))
    assert clock.monotonic() == pytest.approx(1003.0)
    storage.set_mood(root, Mood())
    filesystem.info(str(root / "old"))
    assert clock.monotonic() == pytest.approx(1003.0)


def test_a_call_that_waits_returns_when_the_storage_is_fast_again(opened: Storage, root: Path) -> None:
    class Healing(FakeClock):
        def wait(self, event: threading.Event, timeout: float) -> bool:
            if self.seconds > 1010.0:
                storage.set_mood(root, Mood())
            return super().wait(event, timeout)

    clock = Healing()
    storage.set_mood(root, Mood(slow=1e9))
    DrillFileSystem(str(root), clock=clock, skip_instance_cache=True).info(str(root / "old"))
    assert 1010.0 < clock.monotonic() < 1011.0


def test_of_a_flaky_one_some_calls_fail_and_the_seed_decides_which(opened: Storage, root: Path) -> None:
    def fresh() -> list[bool]:
        return outcomes(DrillFileSystem(str(root), skip_instance_cache=True), root / "old", 200)

    storage.set_mood(root, Mood(flaky=0.3, seed=7))
    first = fresh()
    assert 20 < first.count(False) < 100
    assert fresh() == first
    storage.set_mood(root, Mood(flaky=0.3, seed=8))
    assert fresh() != first


def test_each_change_of_mood_draws_anew(opened: Storage, root: Path) -> None:
    filesystem = DrillFileSystem(str(root), skip_instance_cache=True)
    rounds = []
    for _ in range(2):
        storage.set_mood(root, Mood(flaky=0.5, seed=3))
        rounds.append(outcomes(filesystem, root / "old", 50))
        storage.set_mood(root, Mood())
        assert all(outcomes(filesystem, root / "old", 50))
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("mood", [Mood(), Mood(True, True, 1.5, 0.25, 9)])
def test_a_mood_is_read_as_it_was_set(root: Path, mood: Mood) -> None:
    storage.set_mood(root, mood)
    assert storage.mood(root) == mood
    assert [path.name for path in root.parent.iterdir()] == ["root.mood"]


def test_a_storage_of_which_nothing_was_said_works(root: Path) -> None:
    assert storage.mood(root) == Mood()
