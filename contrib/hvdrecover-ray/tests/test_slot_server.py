"""A real slot server and the remote shell, as processes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdrecover_ray import connections
from hvdrecover_ray.remote_shell import UNREACHABLE

PATIENCE = 60.0  # seconds
KEY = "secret"
Shell = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """A slot server. Closing its input has the effect of the actor's death."""
    command = [sys.executable, "-m", "hvdrecover_ray.slot_server", "127.0.0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        started.stdin.write(f"{KEY}\n")
        started.stdin.flush()
        yield started
        started.kill()


@pytest.fixture
def shell(server: subprocess.Popen[str], tmp_path: Path) -> Iterator[Shell]:
    """Starts the remote shell with arguments of ssh and more variables."""
    assert server.stdout is not None
    slot = {"address": "127.0.0.1", "port": int(server.stdout.readline()), "interface": "lo"}
    slots = [{**slot, "devices": ["5"]}, {**slot, "devices": ["7"]}]
    file = tmp_path / "slots.json"
    file.write_text(json.dumps({"key": KEY, "hosts": {"n1": slots, "gone": [{**slots[0], "port": 1}]}}))
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environ: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "hvdrecover_ray.remote_shell", os.fspath(file), *words]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(program, env={**os.environ, **environ}, text=True, **pipes))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate(timeout=PATIENCE)


def ended(process: subprocess.Popen[str], given: str = "") -> tuple[int, str, str]:
    output, errors = process.communicate(given, timeout=PATIENCE)
    return process.returncode, output, errors


def test_a_command_has_its_input_its_outputs_and_its_exit_code(shell: Shell) -> None:
    command = "tr a-z A-Z; echo to people >&2; exit 7"
    assert ended(shell("-o", "BatchMode=yes", "n1", command), "abc\n") == (7, "ABC\n", "to people\n")


def test_long_output_arrives_complete(shell: Shell) -> None:
    code, output, _ = ended(shell("n1", "yes 0123456789 | head -n 200000"))
    assert (code, len(output)) == (0, 200000 * 11)


def test_a_signal_that_ends_the_command_gives_a_shells_exit_code(shell: Shell) -> None:
    assert ended(shell("n1", "kill -KILL $$"))[0] == 128 + signal.SIGKILL


def test_a_worker_has_the_callers_environment_and_the_gpus_of_its_host(shell: Shell) -> None:
    """The environment is not on command lines. The name of the network interface is the host's."""
    worker = (
        "env HOROVOD_LOCAL_RANK=1 HVDRECOVER_START=1 HOROVOD_GLOO_IFACE=ens5 NCCL_SOCKET_IFNAME=ens5 "
        "sh -c 'echo $WORD $CUDA_VISIBLE_DEVICES $HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME; ps -eo args'"
    )
    code, output, errors = ended(shell("n1", worker, WORD="a 'quoted' word"))
    assert (code, errors) == (0, "")
    assert output.splitlines()[0] == "a 'quoted' word 5,7 lo lo"
    assert "quoted" not in "".join(output.splitlines()[1:])


def test_an_unreachable_slot_gives_the_exit_code_of_ssh(shell: Shell) -> None:
    assert ended(shell("n2", "true")) == (UNREACHABLE, "", "n2: Ray no longer has this slot\n")
    rank = "env HOROVOD_LOCAL_RANK=2 true"
    assert ended(shell("n1", rank)) == (UNREACHABLE, "", "n1: Ray no longer has this slot\n")
    code, _, errors = ended(shell("gone", "true"))
    assert (code, errors) == (UNREACHABLE, "gone: cannot connect to the slot: Connection refused\n")


def test_a_command_gets_sighup_when_its_caller_dies(shell: Shell, tmp_path: Path) -> None:
    note = tmp_path / "note"
    os.mkfifo(note)
    caller = shell(
        "n1", f"trap 'echo hung up >{note}; exit' HUP; echo up; while :; do read x </dev/null; done"
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "up\n"
    caller.kill()
    assert note.read_text() == "hung up\n"


def test_commands_end_with_the_actor(server: subprocess.Popen[str], shell: Shell) -> None:
    caller = shell("n1", "echo $$; exec sleep 1000")
    assert caller.stdout is not None and server.stdin is not None
    child = int(caller.stdout.readline())
    descriptor = os.pidfd_open(child)
    server.stdin.close()
    assert select.select([descriptor], [], [], PATIENCE)[0]
    os.close(descriptor)
    assert caller.wait(PATIENCE) == UNREACHABLE
    assert caller.stderr is not None and caller.stderr.read() == "n1: the slot is gone\n"


def test_a_client_with_another_key_is_refused(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    with pytest.raises(ConnectionRefusedError, match=" key"):
        connections.connect("127.0.0.1", int(server.stdout.readline()), b"another")
