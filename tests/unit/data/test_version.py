"""The version of the training data: local files, and texts."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from hvdrecover.data.version import DataVersion, differences
from hvdrecover.errors import ConfigError

BEGAN = 1_700_000_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for name, size in {"a.bin": 10, "train/b.bin": 20, "train/deep/c.bin": 30}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(size))
        os.utime(file, (BEGAN, BEGAN))
    return folder


def changes(stored: DataVersion, present: DataVersion) -> list[str]:
    return differences(json.loads(json.dumps(stored.as_json())), present)


def test_files_have_names_sizes_and_times(data: Path) -> None:
    time = "2023-11-14T22:13:20Z"
    assert DataVersion.of_files(data).files == {
        "a.bin": (10, time),
        "train/b.bin": (20, time),
        "train/deep/c.bin": (30, time),
    }
    assert DataVersion.of_files(f"file://{data}/train/b.bin").files == {"b.bin": (20, time)}


def test_of_many_changes_the_first_are_named_and_the_others_counted(data: Path) -> None:
    before = DataVersion.of_files(data)
    for number in range(9):
        (data / f"{number}").touch()
    assert changes(before, DataVersion.of_files(data)) == [
        *(f"added: {n}" for n in range(5)),
        "added: 4 more",
    ]


def test_of_many_files_a_manifest_holds_a_digest() -> None:
    files = {f"{number:05}": (number, "2023-11-14T22:13:20Z") for number in range(20_000)}
    before = DataVersion(files=files)
    assert len(json.dumps(before.as_json())) < 200
    assert changes(before, DataVersion(files=dict(files))) == []
    (line,) = changes(before, DataVersion(files={**files, "00007": (7, "2023-11-14T22:13:21Z")}))
    assert line.startswith("the data version was 20000 files of 199990000 bytes (digest ")


def test_links_are_followed_but_not_round_in_circles(data: Path) -> None:
    before = DataVersion.of_files(data).files
    (data / "link.bin").symlink_to(data / "a.bin")
    (data / "train" / "loop").symlink_to(data)
    shutil.copytree(data / "train" / "deep", data.parent / "elsewhere")
    (data / "linked").symlink_to(data.parent / "elsewhere")
    found = DataVersion.of_files(data).files
    assert found == {**before, "link.bin": before["a.bin"], "linked/c.bin": before["train/deep/c.bin"]}


@pytest.mark.parametrize("name", ["nowhere", "empty", "*.bin"])
def test_a_path_without_files_is_refused(data: Path, name: str) -> None:
    (data / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"^data: .*'.*{re.escape(name)}'"):
        DataVersion.of_files(data / name)


@pytest.mark.parametrize("text", ["/data/train", "s3://bucket/train", "", 3])
def test_a_text_is_neither_empty_nor_a_path(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^DataVersion: "):
        DataVersion(text)


def test_a_text_and_files_are_different_versions(data: Path) -> None:
    files = DataVersion.of_files(data)
    assert changes(DataVersion("v1"), DataVersion("v1")) == []
    (line,) = changes(files, DataVersion("v1"))
    assert line.startswith("the data version was 3 files of 60 bytes") and line.endswith("and is 'v1'")
