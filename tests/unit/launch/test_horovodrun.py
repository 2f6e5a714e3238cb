from __future__ import annotations

import argparse
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from horovod.runner.elastic.discovery import HostDiscoveryScript
from horovod.runner.launch import parse_args

from hvdrecover.errors import ConfigError, HostListError
from hvdrecover.launch.horovodrun import Options, arguments, ask_by_shell, hosts, settings
from tests.unit.launch.children import environment

COMMAND = ["python", "train.py", "--epochs", "3"]


def understood(options: Options, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return what ``horovodrun`` itself makes of the arguments."""
    monkeypatch.setattr("sys.argv", ["horovodrun", *arguments(options, COMMAND)])
    return parse_args()


def test_all_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(
        4,
        least=2,
        most=8,
        hosts="h1:4,h2:4",
        interfaces=("eth0", "eth1"),
        ssh_port=2222,
        identity="/keys/id",
        others=("--verbose", "--reset-limit", "7"),
    )
    found = understood(options, monkeypatch)
    assert (found.num_proc, found.min_num_proc, found.max_num_proc) == (4, 2, 8)
    assert subprocess.check_output(found.host_discovery_script, shell=True) == b"h1:4\nh2:4\n"
    assert sorted(found.nics) == ["eth0", "eth1"]
    assert (int(found.ssh_port), found.ssh_identity_file) == (2222, "/keys/id")
    assert (found.verbose, found.reset_limit) == (True, 7)
    assert (found.command, found.cooldown_range, found.use_mpi) == (COMMAND, [10, 600], False)


@pytest.mark.parametrize("discovery", ["exit 1", "printf ''"])
def test_a_discovery_command_that_knows_no_host_yet_is_left_to_horovod(
    discovery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = understood(Options(2, discovery=discovery), monkeypatch)
    assert (found.host_discovery_script, found.nics) == (discovery, None)


@pytest.mark.parametrize("interfaces", [(), ("eth0",)])
def test_a_discovery_command_that_prints_a_command_is_refused(interfaces: tuple[str, ...]) -> None:
    options = Options(2, discovery="echo 'h1;touch\tpwned:1'", interfaces=interfaces)
    with pytest.raises(HostListError, match=r"^--host-discovery-script: line 1: unknown word 'pwned:1'"):
        arguments(options, COMMAND)


@pytest.mark.parametrize("named", ["localhost:4", "127.0.0.1:4", f"{socket.gethostname()}:4"])
def test_one_host_that_is_this_one_needs_the_loopback_interface(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(understood(Options(2, hosts=named), monkeypatch).nics) == ["lo"]


def test_a_hostfile_names_the_hosts_and_an_empty_one_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# all of them\n\nh1 slots = 4   # new\n  h2\n")
    assert hosts(Options(2, hostfile=file)) == {"h1": 4, "h2": 1}
    file.write_text("# none\n\n")
    with pytest.raises(ConfigError, match=r"^--hostfile: "):
        hosts(Options(2, hostfile=file))


def test_any_other_horovod_than_ours_limits_waiting_from_the_start() -> None:
    ours = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10", "HOROVOD_STALL_CHECK_TIME_SECONDS": "2"}
    assert settings(20.0, {}, ours=True) == ours
    assert settings(20.0, {}, ours=False) == {**ours, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}


def test_what_the_user_has_set_stands() -> None:
    mine = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "77", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}
    assert list(settings(None, mine, ours=False)) == ["HOROVOD_STALL_CHECK_TIME_SECONDS"]


# Horovod's own function that runs a worker, after what our driver has set up.
CODE = """
from types import SimpleNamespace
from hvdrecover.launch import horovodrun
horovodrun._leave_to_guardians()
from horovod.runner.gloo_run import _exec_command_fn
settings = SimpleNamespace(elastic=True, verbose=0, output_filename=None, prefix_output_with_timestamp=False)
slot = SimpleNamespace(rank=1, hostname="localhost")
print([_exec_command_fn(settings)(f"exit {code}", slot, None)[0] for code in (3, 129, 255)])
"""


def test_horovod_says_of_a_worker_only_what_its_guardian_cannot() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "Process 1 exit with status code 255.\n[3, 129, 255]\n", done.stderr


class Script(HostDiscoveryScript):
    """Horovod's class, as the launcher changes it."""


ask_by_shell(Script)


def test_its_answer_is_read_by_horovod() -> None:
    hosts = Script("printf 'one:2\\ntwo\\n'", 4).find_available_hosts_and_slots()
    assert list(hosts.items()) == [("one", 2), ("two", 4)]


def test_one_that_fails_gives_no_answer() -> None:
    with pytest.raises(RuntimeError, match=r"`echo one; exit 3` .* exit code 3"):
        Script("echo one; exit 3", 1).find_available_hosts_and_slots()


@pytest.mark.parametrize("name", ["h1;touch${IFS}pwned", "$(touch)", "-oProxyCommand=touch", "a&b", "u@h"])
def test_a_name_that_a_shell_would_run_is_no_answer(name: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"'{name}'")):
        Script(f"printf 'one:2\n%s:1\n' {shlex.quote(name)}", 1).find_available_hosts_and_slots()
