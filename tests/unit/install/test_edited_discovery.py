"""What Horovod makes of the discovery script, as our edits have it run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from horovod.runner.elastic.discovery import HostDiscoveryScript


def test_hosts_are_found_in_the_order_of_the_script() -> None:
    script = HostDiscoveryScript("printf 'z:2\\na:1\\nm\\n'", 4)
    assert list(script.find_available_hosts_and_slots().items()) == [("z", 2), ("a", 1), ("m", 4)]


def test_no_hosts_are_none() -> None:
    assert HostDiscoveryScript("true", 1).find_available_hosts_and_slots() == {}


def test_the_script_is_a_command_of_the_shell_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED", "b")
    script = HostDiscoveryScript('for each in a "$NAMED"; do echo "$each:1"; done | sort -r', 1)
    assert list(script.find_available_hosts_and_slots()) == ["b", "a"]


@pytest.mark.parametrize(
    ("command", "status"), [("echo a:1; exit 3", 3), ("kill -9 $$", -9), ("/no/such/script", 127)]
)
def test_a_script_that_fails_is_an_error_that_names_it(command: str, status: int) -> None:
    with pytest.raises(
        RuntimeError, match=f"{command.split(';')[0]}.*Exit code: {status}".replace("$", r"\$")
    ):
        HostDiscoveryScript(command, 1).find_available_hosts_and_slots()


def test_no_process_comes_between(tmp_path: Path) -> None:
    """Whatever ends this process's group then ends a script that hangs, too."""
    found = tmp_path / "found"
    HostDiscoveryScript(f"cut -d ' ' -f 4,5 /proc/$$/stat > {found}", 1).find_available_hosts_and_slots()
    assert found.read_text().split() == [str(os.getpid()), str(os.getpgid(0))]


def test_what_the_script_says_of_errors_is_seen(capfd: pytest.CaptureFixture[str]) -> None:
    HostDiscoveryScript("echo a:1; echo wrong >&2", 1).find_available_hosts_and_slots()
    assert "wrong" in capfd.readouterr().err
