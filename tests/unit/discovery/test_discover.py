"""The command as Horovod's driver runs it: again and again, whatever its source does."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.commands import call
from tests.unit.launch.children import until

Discover = Callable[..., subprocess.CompletedProcess[str]]
NO_CHECKS = "--no-ssh-check"


@pytest.fixture
def discover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Discover:
    """Call the command in a private folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words, **environ: call("discover", *words, environ=environ)


def test_a_first_answer_that_fails_says_why(discover: Discover, tmp_path: Path) -> None:
    done = discover("file", "missing", NO_CHECKS)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("hvdrecover: file: missing: .*: No such file or directory.*\n", done.stderr)
    (tmp_path / "hosts").write_text("a:x\n")
    assert "hosts: line 1: " in discover("file", "hosts").stderr


@pytest.mark.parametrize("trouble", ["gone", "nonsense", "empty"])
def test_a_source_that_fails_has_its_last_good_answer_given_for_a_while(
    trouble: str, discover: Discover, tmp_path: Path
) -> None:
    file = tmp_path / "hosts"
    file.write_text("a:4\n")
    assert discover("file", file, NO_CHECKS).returncode == 0
    file.write_text({"nonsense": "a b c", "empty": "\n"}.get(trouble, ""))
    if trouble == "gone":
        file.unlink()
    until(lambda: discover("file", file, NO_CHECKS).stderr, "a warning")
    done = discover("file", file, NO_CHECKS)
    assert (done.returncode, done.stdout) == (0, "a:4\n")
    assert "; using its answer of " in done.stderr
    done = discover("file", file, NO_CHECKS, "--last-good", "0.001")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r" answer is \d+ s old", done.stderr)


def hanging(tmp_path: Path) -> Path:
    """A program that prints hosts, and hangs when there is a file."""
    program = tmp_path / "hosts.sh"
    hang = f"[ -e {tmp_path}/hang ] && exec sleep 1000"
    program.write_text(f"#!/bin/sh\n{hang}\necho a:4\necho >> {tmp_path}/calls\n")
    program.chmod(0o755)
    return program


def test_a_source_that_hangs_does_not_hold_up_the_answer(discover: Discover, tmp_path: Path) -> None:
    program = hanging(tmp_path)
    words = ("command", "--timeout", "3", NO_CHECKS, program)
    assert discover(*words).stdout == "a:4\n"
    (tmp_path / "hang").touch()
    assert discover(*words).stdout == "a:4\n"
    until(lambda: re.search(r"hosts\.sh: .* 3 s", discover(*words).stderr), "a warning")


def test_many_calls_at_once_ask_once(discover: Discover, tmp_path: Path) -> None:
    program = hanging(tmp_path)
    command = [sys.executable, "-m", "hvdrecover", "discover", "command", NO_CHECKS, str(program)]
    calls = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    assert [call.communicate(timeout=60)[0] for call in calls] == ["a:4\n"] * 8
    assert len((tmp_path / "calls").read_text()) < 8


def test_where_nothing_can_be_remembered_there_is_an_answer_all_the_same(
    discover: Discover, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = discover("static", "a:1", NO_CHECKS, "--cache", tmp_path / "file" / "folder")
    assert (done.returncode, done.stdout) == (0, "a:1\n")
    assert "the cache of host discovery cannot be written: " in done.stderr


def test_a_check_that_hangs_leaves_no_process(discover: Discover, tmp_path: Path) -> None:
    seconds = str(random.SystemRandom().randrange(10**5, 10**6))
    # On a busy machine, a second may end before the check has begun.
    done = discover("static", "localhost:1", "--check", f"sleep {seconds}", "--timeout", "5")
    assert "sleep" in done.stderr
    command = ["sleep", seconds]
    until(
        lambda: command not in [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])], "its end"
    )


def test_a_users_command_checks_hosts(discover: Discover, tmp_path: Path) -> None:
    check = f"test -e {tmp_path}/fine || {{ echo no GPU >&2; echo --- >&2; exit 3; }}"
    words = ("static", "localhost:1", "--check", check)
    done = discover(*words)
    assert done.returncode == 1
    assert re.search(" 1 hosts? .*:\n  localhost: 'test -e.* 3: no GPU", done.stderr)

    (tmp_path / "fine").touch()
    until(lambda: discover(*words).stdout == "localhost:1\n", "the host is healthy again")


def test_others_add_sources_by_entry_point(discover: Discover, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "rack-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hvdrecover.host_sources]\nrack = rack:rack\nbad = rack:missing\nplain = rack:plain\n"
    )
    (site / "rack.py").write_text(
        "from hvdrecover.discovery import Host, source\n"
        "def plain(environ, timeout):\n"
        "    return [Host('plain', 1)]\n"
        "@source(every=1.0, number='its number', odd_ones='too', size='hosts in it')\n"
        "def rack(environ, timeout, number: int, odd_ones: bool = False, size: int = 2):\n"
        '    """Hosts of one rack."""\n'
        "    if odd_ones:\n"
        "        raise RuntimeError('odd')\n"
        "    return [Host(f'rack{number}-{n}', 4) for n in range(size)]\n"
    )
    path = {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"}
    assert discover("rack", "7", NO_CHECKS, **path).stdout == "rack7-0:4\nrack7-1:4\n"
    assert discover("rack", "7", "--size", "1", NO_CHECKS, **path).stdout == "rack7-0:4\n"
    assert "rack: RuntimeError: odd" in discover("rack", "7", "--odd-ones", NO_CHECKS, **path).stderr
    assert "Hosts of one rack." in discover("rack", "--help", **path).stdout
    assert discover("plain", NO_CHECKS, **path).stdout == "plain:1\n"
    assert re.search("host source 'bad': .* rack:missing' of package rack ", discover("bad", **path).stderr)
    done = discover("shelf", **path)
    assert done.returncode == 1
    assert re.search("host source 'shelf': .* static, file, command, .* bad, plain, ", done.stderr)
