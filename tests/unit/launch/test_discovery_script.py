"""Horovod's driver asks a host discovery script without a process in between."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from horovod.runner.elastic.discovery import HostDiscoveryScript

from hvdrecover.launch import waits
from hvdrecover.launch.processes import kill
from hvdrecover.launch.run_horovodrun import ask_by_shell
from tests.unit.launch.children import until

ASKING = """
import sys
from horovod.runner.elastic.discovery import HostDiscoveryScript
from hvdrecover.launch.run_horovodrun import ask_by_shell
ask_by_shell(HostDiscoveryScript)
HostDiscoveryScript(sys.argv[1], 1).find_available_hosts_and_slots()
"""


class Script(HostDiscoveryScript):
    """Horovod's class, as the launcher changes it."""


ask_by_shell(Script)


@pytest.mark.parametrize("command", ["printf 'one:2\\ntwo\\n'", "echo two >&2; echo one:2 | cat; echo two"])
def test_its_answer_is_read_by_horovod(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    hosts = Script(command, 4).find_available_hosts_and_slots()
    assert list(hosts.items()) == [("one", 2), ("two", 4)]
    assert capfd.readouterr().err == ("two\n" if "&2" in command else "")


def test_it_is_a_child_of_the_launcher() -> None:
    assert Script("echo $PPID", 1).find_available_hosts_and_slots() == {str(os.getpid()): 1}


def test_one_that_fails_gives_no_answer() -> None:
    with pytest.raises(RuntimeError, match=r"`echo one; exit 3` .* exit code 3"):
        Script("echo one; exit 3", 1).find_available_hosts_and_slots()


@pytest.mark.parametrize("name", ["h1;touch${IFS}pwned", "$(touch)", "-oProxyCommand=touch", "a&b", "u@h"])
def test_a_name_that_a_shell_would_run_is_no_answer(name: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"'{name}'")):
        Script(f"printf 'one:2\n%s:1\n' {shlex.quote(name)}", 1).find_available_hosts_and_slots()


def test_one_that_never_ends_gives_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "DISCOVERY", 0.01)
    with pytest.raises(RuntimeError, match="'sleep 1000' has not ended"):
        Script("sleep 1000", 1).find_available_hosts_and_slots()


def test_it_is_killed_with_its_launcher(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command = f"echo $$ > {begun}.new; mv {begun}.new {begun}; exec sleep 60"
    with subprocess.Popen([sys.executable, "-c", ASKING, command]) as launcher:
        until(begun.exists, "the script to begin")
        script = int(begun.read_text())
        kill(launcher.pid)
    until(lambda: not Path(f"/proc/{script}").exists(), "the script to be killed")
