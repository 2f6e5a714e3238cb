"""The facts that are found in an environment, and the variables that the build gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdrecover.errors import InstallError
from hvdrecover.install import build, environment
from hvdrecover.install.environment import Frameworks, Mpi


def add_program(folder: Path, name: str, script: str = "exit 0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_without_a_framework_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"PyTorch .*TensorFlow.*pip install 'hvdrecover\[torch\]'"):
        environment.find_frameworks({}, [str(tmp_path)])


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r" C\+\+ .* make .* Python") as caught:
        environment.require_toolchain({"PATH": str(tmp_path)}, tmp_path)
    assert "apt-get install g++ make python3-dev`" in str(caught.value)


def test_a_site_mpi_is_known_by_its_place_and_what_it_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    variables = {"PATH": str(tmp_path / "opt")}
    program = add_program(tmp_path / "opt", "mpicxx", "echo -lmpi")
    first = environment.choose_mpi(variables, [])
    assert first.identity.startswith(str(program)) and first.installed
    assert first == environment.choose_mpi(variables, [])
    add_program(tmp_path / "opt", "mpicxx", "echo -lother")
    assert environment.choose_mpi(variables, []).identity != first.identity


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
    tmp_path: Path, variables: dict[str, str], offered: bool
) -> None:
    search = [str(tmp_path / "empty"), str(tmp_path)]
    assert environment.find_nccl(variables, search) is None
    nccl = tmp_path / "nvidia" / "nccl"
    (nccl / "include").mkdir(parents=True)
    (nccl / "include" / "nccl.h").touch()
    assert environment.find_nccl(variables, search) == (nccl if offered else None)


def test_the_users_variables_win() -> None:
    user = {
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_CMAKE": "/my/cmake",
        "MAKEFLAGS": "-j7",
        "HOROVOD_GPU": "CUDA",
    }
    variables = {**user, "HOROVOD_LOCAL_VERSION": "theirs"}
    frameworks = Frameworks("2.13.0+cpu", None)
    told = build.build_environment(variables, frameworks, Mpi("none"), Path("/tools"), "hvdrecover.abc")
    assert user.items() <= told.items()
    assert "HOROVOD_WITH_GLOO" not in told
    assert told["HOROVOD_WITHOUT_MPI"] == "1"
    assert "OPAL_PREFIX" not in told
    assert told["HOROVOD_LOCAL_VERSION"] == "hvdrecover.abc"  # the cache depends on it
