"""The cache of built wheels: its keys, and what becomes of damaged wheels."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from hvdrecover.install.wheel_cache import find, is_intact, locked, prune


def make_wheel(folder: Path, name: str = "horovod-0.28.1-cp311-cp311-linux_x86_64.whl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
    return folder / name


def ignore() -> None:
    raise AssertionError("nobody else holds the lock")


def test_a_wheel_with_a_flipped_byte_is_discarded(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 0xFF
    wheel.write_bytes(data)
    assert not is_intact(wheel)
    assert find(tmp_path) is None
    assert not wheel.exists()


def test_the_lock_keeps_others_out_and_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "label"
    with locked(folder, ignore):
        with pytest.raises(AssertionError, match="nobody else"):
            with locked(folder, ignore):
                raise ValueError("two holders")
    with locked(folder, ignore):
        pass


def test_pruning_keeps_the_current_build_and_the_newest(tmp_path: Path) -> None:
    folders = [tmp_path / f"hvdrecover.{number:010}" for number in range(5)]
    for number, folder in enumerate(folders):  # the first was used the longest time ago
        make_wheel(folder)
        os.utime(folder, (1000 + number, 1000 + number))
    (tmp_path / "not-a-build").mkdir()
    prune(folders[0], keep=3)
    assert [folder.is_dir() for folder in folders] == [True, False, False, True, True]
    assert find(folders[0]) and find(folders[4])
    assert (tmp_path / "not-a-build").is_dir()
