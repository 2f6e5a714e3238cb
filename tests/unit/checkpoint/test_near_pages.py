from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import re
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import HUGE_PAGE, Bytes
from hvdrecover.checkpoint.near import pages

NBYTES = 3 * HUGE_PAGE + 4097
SHARED = Path("/dev/shm")


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED) as folder:
        yield Path(folder) / "file"


@pytest.fixture
def file(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    yield file
    os.close(file)


def in_huge_pages(memory: Bytes) -> int:
    """Return how many bytes of a mapping of shared memory are mapped in huge pages."""
    address = f"{memory.ctypes.data:x}-"
    maps = Path("/proc/self/smaps").read_text().split("\n" + address)[1]
    found = re.search(r"ShmemPmdMapped: +(\d+) kB", maps)
    assert found is not None
    return 1024 * int(found[1])


def huge_pages_are_given(folder: Path) -> bool:
    """Return whether a process that asks for huge pages of a file gets them, tried on another file."""
    with (folder / "other").open("w+b") as other:
        os.posix_fallocate(other.fileno(), 0, HUGE_PAGE)
        memory = pages.mapped(other.fileno(), HUGE_PAGE)
        madvise, collapse = ctypes.CDLL(None).madvise, 25
        found: int = madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(HUGE_PAGE), collapse)
    return found == 0


def test_a_new_file_has_all_of_its_memory_and_what_is_written_is_in_it(file: int, path: Path) -> None:
    memory = pages.allocated(file, NBYTES)
    status = os.fstat(file)
    assert len(memory) == status.st_size == NBYTES <= status.st_blocks * 512
    assert not memory.any()
    memory[:] = 7
    assert path.read_bytes() == bytes([7]) * NBYTES


def test_a_file_on_a_disk_has_all_of_its_space(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        memory = pages.allocated(file.fileno(), NBYTES)
        memory[-1] = 7
        assert os.fstat(file.fileno()).st_blocks * 512 >= NBYTES
        del memory
        assert file.read()[-2:] == b"\0\7"


def test_it_is_mapped_in_huge_pages_by_whoever_maps_it(file: int, path: Path) -> None:
    if not huge_pages_are_given(path.parent):
        pytest.skip("this machine has no huge pages on demand")
    memory = pages.allocated(file, NBYTES)
    assert in_huge_pages(memory) == 3 * HUGE_PAGE
    del memory
    for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE):
        again = pages.mapped(file, NBYTES, flags)
        assert sum(map(len, pages.resident(again))) == NBYTES
        assert in_huge_pages(again) == 3 * HUGE_PAGE


def test_what_is_written_to_a_private_mapping_stays_there(file: int, path: Path) -> None:
    pages.allocated(file, NBYTES)
    mine = pages.mapped(file, NBYTES, mmap.MAP_PRIVATE)
    mine[:] = 7
    assert np.all(mine == 7)
    assert not any(path.read_bytes())


def test_a_child_has_none_of_it(file: int) -> None:
    memory = pages.allocated(file, NBYTES)
    if (child := os.fork()) == 0:
        faulthandler.disable()  # what happens is expected
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        memory[0] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert memory[0] == 0


def test_it_is_mapped_for_as_long_as_any_part_of_it_is_in_use(file: int, path: Path) -> None:
    memory = pages.allocated(file, NBYTES)
    part = memory[-8:].view(np.int64)
    del memory
    gc.collect()
    assert str(path) in Path("/proc/self/maps").read_text()
    part[0] = 7
    assert path.read_bytes()[-8:] == (7).to_bytes(8, "little")
    del part
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_what_can_not_be_mapped_is_an_error(file: int, path: Path) -> None:
    os.truncate(file, NBYTES)
    with path.open("rb") as unwritable, pytest.raises(PermissionError):
        pages.mapped(unwritable.fileno(), NBYTES)


def test_a_file_that_was_cut_off_is_an_error_and_no_signal(file: int) -> None:
    os.truncate(file, NBYTES - 1)
    with pytest.raises(OSError, match="shorter"):
        pages.mapped(file, NBYTES)
