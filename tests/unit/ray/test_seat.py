"""A real seat, and what stands in ssh's place, as processes."""

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

from hvdrecover.ray import wire
from hvdrecover.ray.shell import UNREACHABLE

PATIENCE = 60.0  # seconds
KEY = "secret"
Shell = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def seat() -> Iterator[subprocess.Popen[str]]:
    """A seat; its input stands for the actor that has started it."""
    command = [sys.executable, "-m", "hvdrecover.ray.seat", "127.0.0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        started.stdin.write(f"{KEY}\n")
        started.stdin.flush()
        yield started
        started.kill()


@pytest.fixture
def shell(seat: subprocess.Popen[str], tmp_path: Path) -> Iterator[Shell]:
    """Starts what stands in ssh's place, with the arguments of ssh and more variables."""
    assert seat.stdout is not None
    place = {"address": "127.0.0.1", "port": int(seat.stdout.readline()), "interface": "lo"}
    places = [{**place, "devices": ["5"]}, {**place, "devices": ["7"]}]
    file = tmp_path / "seats.json"
    file.write_text(json.dumps({"key": KEY, "seats": {"n1": places, "gone": [{**places[0], "port": 1}]}}))
    started: list[subprocess.Popen[str]] = []

    def start(*words: str, **environ: str) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "hvdrecover.ray.shell", os.fspath(file), *words]
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


def test_much_output_comes_whole(shell: Shell) -> None:
    code, output, _ = ended(shell("n1", "yes 0123456789 | head -n 200000"))
    assert (code, len(output)) == (0, 200000 * 11)


def test_a_command_that_a_signal_ends_has_the_code_of_a_shell(shell: Shell) -> None:
    assert ended(shell("n1", "kill -KILL $$"))[0] == 128 + signal.SIGKILL


def test_horovods_command_has_the_callers_environment_and_the_hosts_devices(shell: Shell) -> None:
    """The environment does not stand on command lines; each host's interface has a name of its own."""
    worker = (
        "env HOROVOD_LOCAL_RANK=1 HVDRECOVER_START=1 HOROVOD_GLOO_IFACE=ens5 NCCL_SOCKET_IFNAME=ens5 "
        "sh -c 'echo $WORD $CUDA_VISIBLE_DEVICES $HOROVOD_GLOO_IFACE $NCCL_SOCKET_IFNAME; ps -eo args'"
    )
    code, output, errors = ended(shell("n1", worker, WORD="a 'quoted' word"))
    assert (code, errors) == (0, "")
    assert output.splitlines()[0] == "a 'quoted' word 5,7 lo lo"
    assert "quoted" not in "".join(output.splitlines()[1:])


def test_what_can_not_be_reached_ends_as_ssh_ends(shell: Shell) -> None:
    assert ended(shell("n2", "true")) == (UNREACHABLE, "", "n2: Ray has no such slot there any more\n")
    rank = "env HOROVOD_LOCAL_RANK=2 true"
    assert ended(shell("n1", rank)) == (UNREACHABLE, "", "n1: Ray has no such slot there any more\n")
    code, _, errors = ended(shell("gone", "true"))
    assert (code, errors) == (UNREACHABLE, "gone: its slot can't be reached: Connection refused\n")


def test_a_command_hears_that_its_caller_is_gone(shell: Shell, tmp_path: Path) -> None:
    note = tmp_path / "note"
    os.mkfifo(note)
    caller = shell(
        "n1", f"trap 'echo hung up >{note}; exit' HUP; echo up; while :; do read x </dev/null; done"
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "up\n"
    caller.kill()
    assert note.read_text() == "hung up\n"


def test_all_ends_with_the_actor(seat: subprocess.Popen[str], shell: Shell) -> None:
    """The actor's end of the seat's input is closed, whatever has killed it."""
    caller = shell("n1", "echo $$; exec sleep 1000")
    assert caller.stdout is not None and seat.stdin is not None
    child = int(caller.stdout.readline())
    descriptor = os.pidfd_open(child)
    seat.stdin.close()
    assert select.select([descriptor], [], [], PATIENCE)[0]
    os.close(descriptor)
    assert caller.wait(PATIENCE) == UNREACHABLE
    assert caller.stderr is not None and caller.stderr.read() == "n1: its slot is gone\n"


def test_who_does_not_know_the_key_gets_nothing(seat: subprocess.Popen[str]) -> None:
    assert seat.stdout is not None
    with pytest.raises(ConnectionRefusedError, match=" key"):
        wire.connect("127.0.0.1", int(seat.stdout.readline()), b"another")
