"""The ssh that horovodrun finds first: its options, and the environment that it hides."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import config
from hvdrecover.config import Config
from hvdrecover.errors import ConfigError
from hvdrecover.launch.ssh import MARK, kept_alive, remote_shell
from tests.unit.launch.children import environment


def call(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "surrogateescape"}
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, timeout=60, **options)


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
        words = ["-p", "22", "h1", "echo 'a  b'"]
        done = call(["ssh", *words], {"PATH": f"{path}{os.pathsep}{os.defpath}"})
        options = ["-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2", "-o", "ConnectTimeout=5"]
        assert done.stdout.splitlines() == [f"<{word}>" for word in [*options, *words]]
        assert done.returncode == 3
        assert [each.name for each in (tmp_path / "run of today" / "bin").iterdir()] == ["ssh"]


def test_another_command_stands_in_its_place(found: Config, tmp_path: Path) -> None:
    """It is called with what Horovod calls ssh with, whether there is an ssh or not."""
    Path(found.path, "ssh").rename(Path(found.path, "other"))
    path = kept_alive(dataclasses.replace(found, remote_shell="other 'a  file'"), tmp_path / "run")
    words = ["-o", "X=no", "h1", "env HVDRECOVER_START=1 python"]
    done = call(["ssh", *words], {"PATH": f"{path}{os.pathsep}{os.defpath}"})
    assert done.stdout.splitlines() == [f"<{word}>" for word in ["a  file", *words]]


SECRET = "wJalr'XUtn\n $HOME `id` \\ \udcff"  # with all that a shell could take for its own

# As sshd does: the command line goes to a shell that knows nothing of who calls, with the caller's input.
SSH = """#!/bin/sh
for each in "$@"; do last="$each"; done
printf '%s\\n' "$@" > "$SSH_ARGUMENTS"
exec env -i PATH="$PATH" HOME=/nowhere /bin/sh -c "$last"
"""
SHOW = "import json, os, sys; json.dump([dict(os.environ), sys.stdin.read()], sys.stdout)"


@pytest.fixture
def ssh(tmp_path: Path) -> dict[str, str]:
    """An environment with an ssh to a host that is this one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    found = dataclasses.replace(
        config.read({}), programs=str(folder), path=os.environ["PATH"], ssh_options="-o A=b"
    )
    return {
        **environment(),
        "PATH": kept_alive(found, tmp_path / "run"),
        "SSH_ARGUMENTS": str(tmp_path / "arguments"),
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HVDRECOVER_SUPERVISOR": "h1/4242:token",
        "CUDA_VISIBLE_DEVICES": "7",
        MARK: "abc",
    }


def test_a_worker_on_another_host_gets_the_environment_and_no_command_line_does(ssh: dict[str, str]) -> None:
    command = f"cd / > /dev/null 2>&1 ; env {MARK}=abc HOROVOD_RANK=1 {sys.executable} -c '{SHOW}'"
    done = call(["ssh", "-p", "22", "h2", command], ssh)
    assert done.returncode == 0, done.stderr
    found, given = json.loads(done.stdout)
    assert found["AWS_SECRET_ACCESS_KEY"] == SECRET
    assert found["HVDRECOVER_SUPERVISOR"] == "h1/4242:token"
    assert (found["HOROVOD_RANK"], found["HOME"], found["PWD"]) == ("1", os.environ["HOME"], "/")
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert given == ""
    arguments = Path(ssh["SSH_ARGUMENTS"]).read_text().splitlines()
    assert arguments == ["-o", "A=b", "-p", "22", "h2", "exec /bin/sh -s"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an installed package that has remote shells."""
    info = tmp_path / "rack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hvdrecover.remote_shells]\nracks = rack_shell\n")
    (tmp_path / "rack_shell.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_installed_remote_shell_runs_as_a_module(site: Path) -> None:
    command = remote_shell("racks 'a file'", os.defpath)
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = call([*command, "-o", "X=1", "n1", "true"], environ)
    assert (done.returncode, done.stdout) == (7, "['a file', '-o', 'X=1', 'n1', 'true']\n")
    assert "rack_shell" not in sys.modules


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("raks file", "'raks' is .*installed: .*racks"),
        ("racks 'file", "split 'racks 'file'"),
        (" ", "blank"),
    ],
)
def test_an_unknown_remote_shell_is_an_error(site: Path, setting: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^HVDRECOVER_REMOTE_SHELL: .*{problem}"):
        remote_shell(setting, os.defpath)
