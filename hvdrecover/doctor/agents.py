"""Asking hosts: on each one a process of ours answers, started by ssh as ``horovodrun`` would start it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover import config
from hvdrecover.discovery.checks import Checks, command_on, is_local
from hvdrecover.doctor.host import MARK
from hvdrecover.errors import LaunchError
from hvdrecover.launch import processes, remote_shells

_CONNECT = 15.0  # seconds for a host's ssh server to answer; one that is busy may need some
_PARTING = 10.0  # seconds for a process to remove what it has made
_NEEDED = ("PYTHONPATH", "LD_LIBRARY_PATH")  # before Python runs; the rest is sent to it
_NOT_HANDED_ON = ("BASH_FUNC_", "OLDPWD", "SSH_")


class Agent:
    """The process that answers for a host.

    Args:
        name: the host, as the user names it.
        ssh_port: of ssh, or None for ssh's own choice.
        identity: ssh's private key, or None.

    Attributes:
        name: the host.
        here: whether it is this host, which takes no ssh.
    """

    def __init__(self, name: str, ssh_port: int | None = None, identity: str | None = None) -> None:
        self.name = name
        self.here = is_local(name)
        self._seen = b""
        self._lost = ""
        checks = Checks(ssh_port, identity, _command())
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe could be full)
        self._process = processes.start(
            _as_jobs_do(command_on(name, checks, here=self.here, seconds=_CONNECT)),
            config.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )

    def ask(self, what: str, *about: Any, timeout: float) -> Any:
        """Ask a question, one of the methods of `hvdrecover.doctor.host.Host`.

        Raises:
            LaunchError: the host has not answered, or with an error; the message holds its words.
        """
        self.send(what, *about)
        return self.answer(time.monotonic() + timeout)

    def send(self, what: str, *about: Any) -> None:
        """Ask a question, and don't wait for the answer."""
        line = json.dumps({"ask": what, "about": about}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """The answer to the question that was sent, by a time of ``time.monotonic()``.

        Raises:
            LaunchError: the host has not answered, or with an error; the message holds its words.
        """
        if self._lost:
            raise LaunchError(self.name, self._lost)
        began = time.monotonic()
        while True:
            line = self._line(deadline)
            if line is None:
                self.kill()  # an answer to come would be taken for that to a later question
                self._lost = f"no answer in {time.monotonic() - began:.0f} s"
                raise LaunchError(self.name, self._lost)
            if line.startswith(MARK):
                told = json.loads(line.removeprefix(MARK))
                if "error" in told:
                    raise LaunchError(self.name, told["error"])
                return told["answer"]

    def close(self) -> None:
        """End the process, after it has removed what it has made."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PARTING)
        self.kill()
        self._complaints.close()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill_group()
        self._process.ends()

    def _line(self, deadline: float) -> str | None:
        """The next line of what the process prints; None if it does not come in time."""
        assert self._process.stdout is not None
        while b"\n" not in self._seen:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                self._fail()
            self._seen += piece
        line, _, self._seen = self._seen.partition(b"\n")
        return line.decode(errors="replace")

    def _fail(self) -> None:
        """Say why the process has ended.

        Raises:
            LaunchError: always.
        """
        how = processes.describe(self._process.wait())
        self._complaints.seek(0)
        text = self._complaints.read().decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        raise LaunchError(self.name, lines[-1] if lines else f"its process has ended with {how}")


class Agents:
    """One for each host; a context manager, at whose end none is left.

    Args:
        names: the hosts.
        ssh_port: of ssh on all of them, or None for ssh's own choice.
        identity: ssh's private key, or None.
    """

    def __init__(self, names: Sequence[str], ssh_port: int | None, identity: str | None) -> None:
        self._agents: dict[str, Agent] = {}
        try:
            for name in names:
                self._agents[name] = Agent(name, ssh_port, identity)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Agent:
        return self._agents[name]

    def ask(
        self, about: Mapping[str, tuple[Any, ...]], what: str, timeout: float
    ) -> dict[str, Any | LaunchError]:
        """Ask several hosts one question at the same time.

        Args:
            about: host to what it is asked about.
            what: the question.
            timeout: seconds for all of them.

        Returns:
            Host to its answer, or to the error that came instead.
        """
        deadline = time.monotonic() + timeout
        for name, arguments in about.items():
            self._agents[name].send(what, *arguments)
        found: dict[str, Any | LaunchError] = {}
        for name in about:
            try:
                found[name] = self._agents[name].answer(deadline)
            except LaunchError as error:
                found[name] = error
        return found

    def close(self) -> None:
        """End all of them, after they have removed what they have made."""
        for agent in self._agents.values():
            agent.close()


def _as_jobs_do(command: list[str]) -> list[str]:
    """Return a command with the remote shell of jobs instead of ssh, if one is set."""
    settings = config.read()
    if not settings.remote_shell or command[0] != "ssh":
        return command
    return [*remote_shells.command(settings.remote_shell, settings.path), *command[1:]]


def handed_on() -> dict[str, str]:
    """The variables that a process on another host is to have, as ``horovodrun`` hands them on."""
    environ = config.environment()
    return {name: value for name, value in environ.items() if not name.startswith(_NOT_HANDED_ON)}


def _command() -> str:
    """Return what a host's shell runs: our Python in our folder, as far as these exist there."""
    environ = config.environment()
    variables = [f"{name}={environ[name]}" for name in _NEEDED if name in environ]
    words = ["env", *variables, sys.executable, "-m", "hvdrecover.doctor.host"]
    return f"cd {shlex.quote(os.fspath(Path.cwd()))} 2>/dev/null; exec {shlex.join(words)}"
