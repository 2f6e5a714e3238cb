from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from hvdrecover import config
from hvdrecover.config import Config
from hvdrecover.launch.ssh import kept_alive


@pytest.fixture
def found(tmp_path: Path) -> Config:
    """A configuration whose only ssh prints its arguments."""
    programs, path = tmp_path / "env of python", tmp_path / "bin"
    for folder in (programs, path):
        folder.mkdir()
    (path / "ssh").write_text('#!/bin/sh\nfor each in "$@"; do echo "<$each>"; done\nexit 3\n')
    (path / "ssh").chmod(0o755)
    return dataclasses.replace(config.read({}), programs=str(programs), path=str(path))


def test_ssh_on_the_path_has_the_options_first_and_hands_on_the_rest(found: Config, tmp_path: Path) -> None:
    for _ in range(2):  # a run may be started again
        path = kept_alive(found, tmp_path / "run of today")
        done = subprocess.run(
            ["ssh", "-p", "22", "h1", "echo 'a  b'"],
            env={"PATH": f"{path}{os.pathsep}{os.defpath}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        options = ["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2", "-o", "ConnectTimeout=5"]
        assert done.stdout.splitlines() == [
            f"<{word}>" for word in [*options, "-p", "22", "h1", "echo 'a  b'"]
        ]
        assert done.returncode == 3
        assert [each.name for each in (tmp_path / "run of today" / "bin").iterdir()] == ["ssh"]


def test_the_environments_own_programs_are_found_as_well(found: Config, tmp_path: Path) -> None:
    assert kept_alive(found, tmp_path).split(os.pathsep)[1:] == [found.programs, found.path]


def test_another_command_stands_in_its_place(found: Config, tmp_path: Path) -> None:
    """It is called with what Horovod calls ssh with, whether there is an ssh or not."""
    Path(found.path, "ssh").rename(Path(found.path, "other"))
    path = kept_alive(dataclasses.replace(found, remote_shell="other 'a  file'"), tmp_path / "run")
    done = subprocess.run(
        ["ssh", "-o", "X=no", "h1", "env HVDRECOVER_START=1 python"],
        env={"PATH": f"{path}{os.pathsep}{os.defpath}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    words = ["a  file", "-o", "X=no", "h1", "env HVDRECOVER_START=1 python"]
    assert done.stdout.splitlines() == [f"<{word}>" for word in words]
