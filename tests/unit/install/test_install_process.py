"""Running commands, and the explanation of a failure."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hvdrecover.errors import InstallError
from hvdrecover.install.horovod import Runner, relevant_tail, remedy_for


def run(folder: Path, script: str) -> list[str]:
    runner = Runner(folder / "logs" / "build.log")
    return runner.run("Doing it", ["/bin/sh", "-c", script], environ=os.environ)


def test_each_command_returns_its_own_output_and_the_log_has_all(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "build.log")
    for number in (1, 2):
        command = ["/bin/sh", "-c", f"echo out {number}; echo err {number} >&2"]
        assert runner.run("Doing it", command, environ=os.environ) == [f"out {number}\n", f"err {number}\n"]
    with pytest.raises(
        InstallError, match=r"failed \(exit status 3\)\.\n  \| bad\nThe whole log: .*build\.log"
    ):
        runner.run("Doing it", ["/bin/sh", "-c", "echo bad; exit 3"], environ=os.environ)
    assert [word in runner.log.read_text() for word in ("out 1", "err 2", "$ /bin/sh", "bad")] == [True] * 4


def test_sigterm_ends_all_that_was_started_and_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; sleep 1; kill -TERM {os.getpid()}; wait")
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_excerpt_begins_at_the_first_error() -> None:
    lines = [
        "/usr/bin/c++ -Werror: a.cc\n",
        "a.cc:1: warning: meh\n",
        "/src/a.cc:10:5: error: 'x' was not declared\n",
        "\n",
        "   10 | x = 1;\n",
        "make: *** [a.cc.o] Error 1\n",
    ]
    excerpt = ["/src/a.cc:10:5: error: 'x' was not declared", "   10 | x = 1;", "make: *** [a.cc.o] Error 1"]
    assert relevant_tail(lines) == excerpt


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus", "Memory"),
        ("Could NOT find MPI (missing: MPI_CXX_FOUND)", "HOROVOD_WITHOUT_MPI"),
        ("/usr/bin/ld: cannot find -lcudadevrt: No such file or directory", "lib64"),
        ("ERROR: No matching distribution found for horovod==0.28.1", "PIP_FIND_LINKS"),
        (
            "ProxyError('Cannot connect to proxy.')\nERROR: No matching distribution",
            "correct HTTPS_PROXY",
        ),
        ("error: externally-managed-environment", "make a virtual environment"),
    ],
)
def test_known_failures_have_a_remedy(line: str, named: str) -> None:
    assert named in remedy_for(["x\n", f"{line}\n"])
    assert remedy_for(["something else\n"]) == ""
