"""Files of deleted commits are written over, unless that could be noticed."""

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint.storage import LocalStorage, spares
from tests.integration.mounts import mounted

SIZE = 3 * 4096 + 5


def data(number, size=SIZE):
    return np.full(size, number, dtype=np.uint8)


@pytest.fixture
def root(tmp_path):
    if not spares._is_of_this_host(tmp_path):
        pytest.skip("temporary files lie on a file system of which another host might have files open")
    return tmp_path


@pytest.fixture
def storage(root):
    return LocalStorage(root)


def inode(path):
    return path.stat().st_ino


def hidden(root):
    return [path for path in root.rglob("*") if path.name.startswith(".")]


def rewrite(storage, root, new=2):
    """Write a file, delete it and write another one; whether that went over the first one's bytes."""
    storage.write("a/file", data(1))
    first = inode(root / "a/file")
    holder = os.open(root / "a/file", os.O_PATH)  # keeps the number from being given to a new file
    storage.delete("a")
    storage.write("b/file", data(new))
    os.close(holder)
    assert (root / "b/file").read_bytes() == data(new).tobytes()
    return inode(root / "b/file") == first


def test_a_deleted_file_is_written_over(storage, root):
    assert rewrite(storage, root)
    assert hidden(root) == []


def test_each_size_is_matched(storage, root):
    sizes = {"model": SIZE, "optimizer": 2 * SIZE, "empty": 0}
    for name, size in sizes.items():
        storage.write(f"a/{name}", data(1, size))
    old = {name: inode(root / "a" / name) for name in sizes}
    storage.delete("a")
    assert len(hidden(root)) == 3
    for name, size in reversed(sizes.items()):
        storage.write(f"b/{name}", data(2, size))
        assert (root / "b" / name).read_bytes() == data(2, size).tobytes()
    assert {name: inode(root / "b" / name) for name in sizes} == old


def test_a_file_that_somebody_has_open_is_left_to_him(storage, root):
    storage.write("a/file", data(1))
    with (root / "a/file").open("rb") as reader:
        storage.delete("a")
        storage.write("b/file", data(2))
        assert reader.read() == data(1).tobytes()
    assert hidden(root) == []


def test_a_file_that_somebody_has_mapped_is_left_to_him(storage, root):
    storage.write("a/file", data(1))
    with (root / "a/file").open("rb") as reader:
        mapped = mmap.mmap(reader.fileno(), 0, access=mmap.ACCESS_READ)
    storage.delete("a")
    storage.write("b/file", data(2))
    assert mapped[:] == data(1).tobytes()
    mapped.close()


def test_a_file_with_another_name_is_left_as_it_is(storage, root):
    storage.write("a/file", data(1))
    os.link(root / "a/file", root / "backup")
    storage.delete("a")
    storage.write("b/file", data(2))
    assert (root / "backup").read_bytes() == data(1).tobytes()
    assert hidden(root) == []


def test_a_file_that_another_process_writes_still_is_left_to_it(storage, root):
    storage.write("a/file", data(1))
    late = os.open(root / "a/file", os.O_WRONLY)  # such as a writer that was replaced
    storage.delete("a")
    storage.write("b/file", data(2))
    os.pwrite(late, b"late", 0)
    os.close(late)
    assert (root / "b/file").read_bytes() == data(2).tobytes()


def test_who_opens_a_file_while_it_is_looked_at_does_not_kill_this_process(storage, root):
    (root / "file").write_bytes(b"x")
    done = threading.Event()

    def open_often():
        while not done.is_set():
            (root / "file").read_bytes()

    reader = threading.Thread(target=open_often)
    reader.start()
    answers = {spares._is_nobody_elses(root / "file") for _ in range(3000)}
    done.set()
    reader.join()
    assert True in answers  # there were moments between; and SIGIO, by which a lease is broken, kills


def test_of_files_of_one_size_one_is_kept(storage, root):
    for name in ("x", "y"):
        storage.write(f"a/{name}", data(1))
    storage.delete("a")
    assert len(hidden(root)) == 1


def test_files_that_the_newest_commit_has_no_use_for_are_deleted(storage, root):
    storage.write("a/file", data(1))
    storage.delete("a")
    storage.write("b/file", data(2, 100))
    storage.delete("nothing")
    storage.write("c/file", data(2, 200))
    storage.delete("b")
    assert hidden(root) == []


def test_who_only_deletes_keeps_nothing(storage, root):
    storage.write("a/file", data(1))
    LocalStorage(root).delete("a")
    assert list(root.iterdir()) == []


def test_closing_deletes_them_and_writing_continues(storage, root):
    storage.write("a/file", data(1))
    storage.delete("a")
    storage.close()
    assert list(root.iterdir()) == []
    storage.write("b/file", data(2))
    assert (root / "b/file").read_bytes() == data(2).tobytes()


def test_a_job_that_starts_deletes_what_one_that_was_killed_has_kept(storage, root):
    storage.write("a/file", data(1))
    storage.delete("a")
    LocalStorage(root).tidy(lambda folder: True)
    assert list(root.iterdir()) == []
    storage.write("b/file", data(2))  # by the old job, which was not killed after all
    assert (root / "b/file").read_bytes() == data(2).tobytes()


def test_a_link_is_not_kept(storage, root):
    storage.write("a/file", data(1, 6))
    (root / "a" / "link").symlink_to("target")
    assert (root / "a" / "link").lstat().st_size == 6
    (root / "a" / "file").unlink()
    storage.delete("a")
    assert list(root.iterdir()) == []


def test_what_is_there_already_is_not_replaced_by_a_spare(storage, root):
    storage.write("a/file", data(1))
    storage.delete("a")
    (root / "b").mkdir()
    (root / "b/file").symlink_to(root / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        storage.write("b/file", data(2))
    assert hidden(root) == []


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_only_file_systems_of_one_host_count(tmp_path, kind):
    with mounted(kind, tmp_path / "disk", tmp_path / "image", 32 << 20) as disk:
        folder = Path(disk.folder)
        assert rewrite(LocalStorage(folder), folder) == (kind == "ext4")
