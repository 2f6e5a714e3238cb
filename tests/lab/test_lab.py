"""The lab itself: its hosts reach each other, fail the way real ones do, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from tests.support.commands import wait_until
from tests.support.lab import Host, Lab, traces

PATIENCE = 200.0  # seconds for anything that is sure to come
SSH = ["ssh", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"]
OWNER = """
from tests.support.lab import Lab
lab = Lab()
lab.hosts[1].run(["sleep", "1000"])
print(lab.number, flush=True)
input()
"""


def ssh(lab: Lab, source: Host, target: Host, *command: str, seconds: int = 60) -> subprocess.Popen[str]:
    """Start a command on a host, from another one, which is given some seconds to answer."""
    words = [*SSH, "-i", os.fspath(lab.key), "-o", f"ConnectTimeout={seconds}", target.address]
    return source.run([*words, *command])


def said(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return output


def echoed(cat: subprocess.Popen[str], line: str) -> str:
    assert cat.stdin is not None and cat.stdout is not None
    cat.stdin.write(f"{line}\n")
    cat.stdin.flush()
    return cat.stdout.readline().strip()


def assert_silent(lab: Lab, source: Host, target: Host) -> None:
    """No answer at all: a host that is there would refuse or reset a connection that it doesn't want."""
    attempt = ssh(lab, source, target, "true", seconds=5)
    _, errors = attempt.communicate(timeout=PATIENCE)
    assert attempt.returncode == 255
    assert "timed out" in errors or "No route to host" in errors


def marked(mark: str) -> list[int]:
    found = psutil.process_iter(["environ"])
    return [process.pid for process in found if mark in (process.info["environ"] or {}).values()]


def test_hosts_have_names_of_their_own_and_log_in_by_the_labs_key_alone(lab: Lab) -> None:
    command = [sys.executable, "-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
    for source in lab.hosts:
        assert said(source.run(command)).strip() == source.address
        for target in lab.hosts:
            answer = said(ssh(lab, source, target, "ip netns identify; echo $SSH_CONNECTION"))
            name, connection = answer.splitlines()
            assert name == target.name
            assert connection.split()[0::2] == [source.address, target.address]
    session = lab.hosts[0].run([*SSH, "-v", "-i", os.fspath(lab.key), lab.hosts[1].address, "true"])
    _, steps = session.communicate(timeout=PATIENCE)
    assert session.returncode == 0
    assert str(lab.key) in steps
    assert os.fspath(Path("~root/.ssh").expanduser()) not in steps


def test_a_host_that_is_cut_off_is_silent_until_it_joins(lab: Lab) -> None:
    first, second, third = lab.hosts
    cat = ssh(lab, first, second, "cat")
    assert echoed(cat, "before") == "before"
    second.cut_off()
    assert_silent(lab, first, second)
    assert_silent(lab, second, third)
    said(ssh(lab, first, third, "true"))
    assert cat.poll() is None
    second.join()
    assert echoed(cat, "after") == "after"  # over the same connection: neither end had heard of a fault
    said(ssh(lab, second, third, "true"))


def test_a_host_without_power_is_silent_and_knows_nothing_when_it_is_back(lab: Lab) -> None:
    first, second, third = lab.hosts
    cats = [ssh(lab, first, host, "cat") for host in (second, third)]
    assert [echoed(cat, "before") for cat in cats] == ["before"] * 2
    sleeper = third.run(["sleep", "1000"])
    elsewhere = first.processes() + second.processes()

    third.power_off()
    assert sleeper.wait(PATIENCE) == -signal.SIGKILL
    assert third.processes() == []
    assert_silent(lab, first, third)
    assert first.processes() + second.processes() == elsewhere
    assert echoed(cats[0], "after") == "after"
    assert cats[1].poll() is None  # nobody told it

    third.power_on()
    said(ssh(lab, first, third, "true"))
    # What is sent is answered with a reset: this line, or already TCP's late acknowledgement of the last one.
    answer, _ = cats[1].communicate("after\n", timeout=PATIENCE)
    assert (answer, cats[1].returncode) == ("", 255)


def test_a_lab_whose_owner_is_killed_is_removed() -> None:
    mark = uuid.uuid4().hex
    environ = {**os.environ, "MARK": mark}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            number = int(owner.stdout.readline())
            assert traces(number)
            assert len(marked(mark)) > 1
        finally:
            owner.kill()
    wait_until(lambda: traces(number) == [] and marked(mark) == [], PATIENCE)
