"""Our changes to Horovod's driver, with the real one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from horovod.runner.elastic.discovery import HostDiscoveryScript

from hvdrecover.launch.run_horovodrun import ask_by_shell
from tests.unit.launch.children import environment

# Horovod's own function that runs a worker, after what our driver has set up.
CODE = """
from types import SimpleNamespace
from hvdrecover.launch import run_horovodrun
run_horovodrun._leave_to_guardians()
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


# -- host discovery: Horovod's driver asks the script without a process in between --------------------


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
