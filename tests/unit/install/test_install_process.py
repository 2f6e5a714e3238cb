"""Running commands: the log, the progress, and the explanation of a failure."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from hvdrecover.errors import InstallError
from hvdrecover.install.process import Progress, Runner, relevant_tail, remedy_for


def plain() -> tuple[Progress, list[str]]:
    lines: list[str] = []
    return Progress(lines.append, clock=lambda: 0.0), lines


def run(folder: Path, script: str) -> list[str]:
    with Runner(folder / "logs" / "build.log", plain()[0]) as runner:
        return runner.run("Doing it", ["/bin/sh", "-c", script], environ=os.environ)


def test_a_failure_shows_why_and_names_the_log(tmp_path: Path) -> None:
    with pytest.raises(InstallError) as caught:
        run(tmp_path, "echo 'fatal error: no such header'; exit 3")
    message = str(caught.value)
    assert re.match(r"Doing it: .* 3\)\.\n  \| fatal error: no such header\n", message)
    assert str(tmp_path / "logs" / "build.log") in message


def test_an_interruption_ends_all_that_was_started(tmp_path: Path) -> None:
    progress, _ = plain()

    class Interrupting:
        step, finish = progress.step, progress.finish

        def watch(self, line: str) -> None:
            self.child = int(line)
            raise KeyboardInterrupt

    watcher = Interrupting()
    with Runner(tmp_path / "log", watcher) as runner:
        with pytest.raises(KeyboardInterrupt):
            runner.run("Doing it", ["/bin/sh", "-c", "sleep 60 & echo $!; wait"], environ=os.environ)
    deadline = time.monotonic() + 10
    while alive(watcher.child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(watcher.child)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sigterm_ends_the_command_and_is_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Runner(tmp_path / "log", plain()[0]) as runner:
        with pytest.raises(SystemExit) as caught:
            runner.run(
                "Doing it", ["/bin/sh", "-c", f"kill -TERM {os.getpid()}; sleep 60"], environ=os.environ
            )
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_excerpt_begins_at_the_first_error_without_noise() -> None:
    lines = [
        "[  3%] Building CXX object a.cc.o\n",
        "cd /build && /usr/bin/c++ -Werror: a.cc\n",
        "/usr/bin/c++ -DX=error: a.cc\n",
        "a.cc:1: warning: meh\n",
        "/src/a.cc:10:5: error: 'x' was not declared\n",
        "   10 | x = 1;\n",
        "make[2]: Entering directory '/build'\n",
        "make: *** [a.cc.o] Error 1\n",
    ]
    excerpt = ["/src/a.cc:10:5: error: 'x' was not declared", "   10 | x = 1;", "make: *** [a.cc.o] Error 1"]
    assert relevant_tail(lines) == excerpt
    assert relevant_tail(lines, 2) == excerpt[:2]


def test_known_failures_have_a_remedy() -> None:
    assert (
        "memory"
        in (remedy_for(["c++: fatal error: Killed signal terminated program cc1plus\n"]) or "").lower()
    )
    assert "HOROVOD_WITHOUT_MPI" in (
        remedy_for(["x\n", "Could NOT find MPI (missing: MPI_CXX_FOUND)\n"]) or ""
    )
    assert "lib64" in (
        remedy_for(["/usr/bin/ld: cannot find -lcudadevrt: No such file or directory\n"]) or ""
    )
    assert remedy_for(["something else\n"]) is None


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (["ERROR: No matching distribution found for horovod==0.28.1\n"], "PIP_FIND_LINKS"),
        (
            [
                "WARNING: Retrying after connection broken by 'ProxyError('Cannot connect to proxy.')'\n",
                "ERROR: No matching distribution found for horovod==0.28.1\n",
            ],
            "correct or unset HTTPS_PROXY",
        ),
        (["error: externally-managed-environment\n"], "make a virtual environment"),
    ],
)
def test_what_pip_says_has_a_remedy(lines: list[str], named: str) -> None:
    assert named in (remedy_for(lines) or "")
