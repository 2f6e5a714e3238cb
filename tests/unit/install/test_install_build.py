"""The build: facts of the environment, and the files of the compiler and the wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdrecover.errors import InstallError
from hvdrecover.install import environment, horovod
from hvdrecover.install.edits import EDITS
from hvdrecover.install.environment import Mpi


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r" C\+\+ .* make .* Python") as caught:
        environment.require_toolchain({"PATH": str(tmp_path)}, tmp_path)
    assert "apt-get install g++ make python3-dev`" in str(caught.value)


def test_a_site_mpi_is_known_by_its_place_and_what_it_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "path", [])
    variables = {"PATH": str(tmp_path / "opt")}
    program = tmp_path / "opt" / "mpicxx"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho -lmpi\n")
    program.chmod(0o755)
    first = environment.choose_mpi(variables)
    assert first.identity.startswith(str(program)) and first.installed
    assert first == environment.choose_mpi(variables)
    program.write_text("#!/bin/sh\necho -lother\n")
    assert environment.choose_mpi(variables).identity != first.identity


@pytest.mark.parametrize(
    ("variables", "offered"),
    [
        ({"HOROVOD_GPU_OPERATIONS": "NCCL"}, True),
        ({"HOROVOD_GPU_ALLREDUCE": "NCCL"}, True),
        ({}, False),
        ({"HOROVOD_GPU_OPERATIONS": "MPI"}, False),
        ({"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/opt/nccl"}, False),
    ],
)
def test_pytorchs_nccl_is_offered_to_a_build_with_nccl(
    tmp_path: Path, variables: dict[str, str], offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "empty"), str(tmp_path)])
    assert environment.find_nccl(variables) is None
    nccl = tmp_path / "nvidia" / "nccl"
    (nccl / "include").mkdir(parents=True)
    (nccl / "include" / "nccl.h").touch()
    assert environment.find_nccl(variables) == (nccl if offered else None)


def test_the_users_variables_win() -> None:
    user = {
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_CMAKE": "/my/cmake",
        "MAKEFLAGS": "-j7",
        "HOROVOD_GPU": "CUDA",
    }
    variables = {**user, "HOROVOD_LOCAL_VERSION": "theirs"}
    frameworks = {"torch": "2.13.0+cpu"}
    told = horovod.build_environment(variables, frameworks, Mpi("none"), Path("/tools"), "hvdrecover.abc")
    assert user.items() <= told.items()
    assert "HOROVOD_WITH_GLOO" not in told
    assert told["HOROVOD_WITHOUT_MPI"] == "1"
    assert "OPAL_PREFIX" not in told
    assert told["HOROVOD_LOCAL_VERSION"] == "hvdrecover.abc"  # the cache depends on it


def test_nccl_is_where_the_build_looks_and_can_be_offered_again(tmp_path: Path) -> None:
    nccl, folder = tmp_path / "site" / "nccl", tmp_path / "hvdrecover.abc"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (nccl / file).parent.mkdir(parents=True, exist_ok=True)
        (nccl / file).write_text(file)
    folder.mkdir()
    for _ in range(2):
        home = Path(horovod.offer_nccl(nccl, folder)["HOROVOD_NCCL_HOME"])
        assert (home / "include" / "nccl.h").read_text() == "include/nccl.h"
        for name in ("libnccl.so", "libnccl.so.2"):
            assert (home / "lib" / name).read_text() == "lib/libnccl.so.2"
    assert home.parent == folder


def test_the_notice_that_goes_into_the_wheel_names_what_is_edited() -> None:
    edited = {edit.file.split("/")[1] for edit in EDITS if edit.file.startswith("third_party/")}
    named = {line.split(" (")[0].lower() for line in horovod.notice().splitlines() if "(https://" in line}
    assert named == {"horovod", *edited}
