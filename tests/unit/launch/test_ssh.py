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


def test_ssh_on_the_path_has_the_options_first_and_hands_on_the_rest(found: Config) -> None:
    with kept_alive(found) as path:
        done = subprocess.run(
            ["ssh", "-p", "22", "h1", "echo 'a  b'"],
            env={"PATH": f"{path}{os.pathsep}{os.defpath}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    options = ["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2", "-o", "ConnectTimeout=5"]
    assert done.stdout.split("\n")[:-1] == [
        f"<{word}>" for word in [*options, "-p", "22", "h1", "echo 'a  b'"]
    ]
    assert done.returncode == 3


def test_the_environments_own_programs_are_found_as_well(found: Config) -> None:
    with kept_alive(found) as path:
        assert path.split(os.pathsep)[1:] == [found.programs, found.path]


def test_nothing_is_left_behind(found: Config) -> None:
    with kept_alive(found) as path:
        folder = Path(path.split(os.pathsep)[0])
        assert (folder / "ssh").exists()
    assert not folder.exists()


def test_where_there_is_no_ssh_there_is_nothing_to_do(found: Config) -> None:
    Path(found.path, "ssh").unlink()
    with kept_alive(found) as path:
        assert path == os.pathsep.join([found.programs, found.path])
