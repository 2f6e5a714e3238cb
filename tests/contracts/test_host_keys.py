"""OpenSSH's check of host keys before a worker's environment is sent, with a real sshd."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from horovod.runner.util.remote import get_remote_command

from hvdrecover import config
from hvdrecover.launch.ssh import MARK, kept_alive
from tests.contracts.servers import HOST, OTHER_KEY, SftpServer


@pytest.mark.parametrize(
    ("checking", "known", "reaches"),
    [
        ("yes", "right", True),
        ("yes", "changed", False),
        ("yes", "", False),
        ("accept-new", "", True),
        ("accept-new", "changed", False),
        ("", "changed", True),
    ],
)
def test_only_a_host_whose_key_is_accepted_gets_the_environment(
    sftp_server: SftpServer, tmp_path: Path, checking: str, known: str, reaches: bool
) -> None:
    """By the command that horovodrun makes: it says StrictHostKeyChecking=no, after our options."""
    lines = {
        "right": sftp_server.known_hosts(),
        "changed": f"[{HOST}]:{sftp_server.port} {OTHER_KEY}\n",
        "": "",
    }
    (tmp_path / "known").write_text(lines[known])
    options = f"-o UserKnownHostsFile={tmp_path}/known -o GlobalKnownHostsFile=/dev/null -o BatchMode=yes"
    if checking:
        options += f" -o StrictHostKeyChecking={checking}"
    path = kept_alive(
        dataclasses.replace(config.read({}), path=os.environ["PATH"], ssh_options=options), tmp_path / "run"
    )
    worker = shlex.quote(f"env {MARK}=1 sh -c 'echo $SECRET'")
    command = get_remote_command(worker, HOST, sftp_server.port, sftp_server.key)
    done = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PATH": path, MARK: "1", "SECRET": "s3cret"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode == 0) == reaches, done.stderr
    assert (done.stdout == "s3cret\n") == reaches
    assert reaches or "Host key verification failed" in done.stderr
