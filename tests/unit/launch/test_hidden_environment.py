from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdrecover import config
from hvdrecover.launch.ssh import MARK, kept_alive
from tests.unit.launch.children import environment

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


def called(ssh: dict[str, str], command: str) -> tuple[str, list[str]]:
    """Return what a command prints on that host, and ssh's arguments."""
    done = subprocess.run(
        ["ssh", "-p", "22", "h2", command],
        env=ssh,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        errors="surrogateescape",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, Path(ssh["SSH_ARGUMENTS"]).read_text().splitlines()


def test_a_worker_on_another_host_gets_the_environment_and_no_command_line_does(ssh: dict[str, str]) -> None:
    command = f"cd / > /dev/null 2>&1 ; env {MARK}=abc HOROVOD_RANK=1 {sys.executable} -c '{SHOW}'"
    printed, arguments = called(ssh, command)
    found, given = json.loads(printed)
    assert found["AWS_SECRET_ACCESS_KEY"] == SECRET
    assert found["HVDRECOVER_SUPERVISOR"] == "h1/4242:token"
    assert (found["HOROVOD_RANK"], found["HOME"], found["PWD"]) == ("1", os.environ["HOME"], "/")
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert given == ""
    assert arguments == ["-o", "A=b", "-p", "22", "h2", "exec /bin/sh -s"]


def test_other_calls_of_ssh_are_left_as_they_are(ssh: dict[str, str]) -> None:
    printed, arguments = called(ssh, f"{sys.executable} -c '{SHOW}'")
    assert "token" not in printed
    assert arguments[-1].startswith(sys.executable)


def test_the_exit_code_is_the_workers(ssh: dict[str, str]) -> None:
    done = subprocess.run(["ssh", "h2", f"env {MARK}=abc sh -c 'exit 75'"], env=ssh, timeout=60)
    assert done.returncode == 75


def test_horovods_own_commands_name_nothing_that_is_private(tmp_path: Path) -> None:
    """Of the real `horovodrun`: its function that makes the commands, after what our driver has set up."""
    code = """
import sys
from types import SimpleNamespace
from hvdrecover.launch import run_horovodrun
run_horovodrun._hide_environment()
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.gloo_run import _slot_info_to_command_fn
import os
env = {**os.environ, "HOROVOD_FUSION_THRESHOLD": "7"}
print(_slot_info_to_command_fn("train", env)(SlotInfo("h2", 0, 0, 0, 1, 1, 1)))
"""
    secrets = {"AWS_SECRET_ACCESS_KEY": "SECRET1", "HVDRECOVER_SUPERVISOR": "SECRET2", "EXTRA": "SECRET3"}
    environ = {**environment(), **secrets, MARK: "abc", "NCCL_DEBUG": "INFO"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "SECRET" not in done.stdout
    for kept in (
        f" {MARK}=abc ",
        " HOROVOD_FUSION_THRESHOLD=7 ",
        " NCCL_DEBUG=INFO ",
        " train\n",
    ):
        assert kept in done.stdout
