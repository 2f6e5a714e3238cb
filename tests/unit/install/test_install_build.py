"""Horovod's source is unpacked, by any Python 3.11; NCCL is offered under the name that linkers look for."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from hvdrecover.install import EDITS, build
from hvdrecover.install.environment import HOROVOD_VERSION
from hvdrecover.install.process import Runner

FOLDER = f"horovod-{HOROVOD_VERSION}"


class Downloading:
    """A runner that downloads a source with one file."""

    def run(self, title: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        work = Path(command[-1])
        (work / "file").touch()
        with tarfile.open(work / f"{FOLDER}.tar.gz", "w:gz") as tar:
            tar.add(work / "file", f"{FOLDER}/setup.py")


def test_a_python_whose_tarfile_has_no_filters_unpacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.2, of Debian 12, has no filters; they came with 3.11.4."""
    extract = tarfile.TarFile.extractall

    def extractall(self: tarfile.TarFile, path: Any) -> None:
        self.extraction_filter = lambda member, path: member
        extract(self, path)

    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    assert (build.fetch(cast(Runner, Downloading()), tmp_path, {}) / "setup.py").is_file()


def test_nccl_is_where_the_build_looks_and_can_be_offered_again(tmp_path: Path) -> None:
    nccl, folder = tmp_path / "site" / "nccl", tmp_path / "hvdrecover.abc"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (nccl / file).parent.mkdir(parents=True, exist_ok=True)
        (nccl / file).write_text(file)
    folder.mkdir()
    for _ in range(2):
        home = Path(build.offer_nccl(nccl, folder)["HOROVOD_NCCL_HOME"])
        assert (home / "include" / "nccl.h").read_text() == "include/nccl.h"
        for name in ("libnccl.so", "libnccl.so.2"):
            assert (home / "lib" / name).read_text() == "lib/libnccl.so.2"
    assert home.parent == folder


def test_the_notice_that_goes_into_the_wheel_names_what_is_edited() -> None:
    edited = {edit.file.split("/")[1] for edit in EDITS if edit.file.startswith("third_party/")}
    named = {line.split(" (")[0].lower() for line in build.notice().splitlines() if "(https://" in line}
    assert named == {"horovod", *edited}
