"""The doctor's side of its conversation with each host; ``host.py`` describes the protocol."""

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

_CONNECT = 15.0  # seconds for a busy host's ssh server to answer
_CLEANING = 10.0  # seconds for the process to remove its test files
_NEEDED = ("PYTHONPATH", "LD_LIBRARY_PATH")  # before Python starts; `adopt` sends the other variables
_NOT_PASSED_ON = ("BASH_FUNC_", "OLDPWD", "SSH_")


class Agent:
    """The process that answers questions on a host.

    Args:
        name: the host, as the user names it.
        ssh_port: port of the ssh server, or None for the default of ssh.
        identity: file of ssh's private key, or None.

    Attributes:
        here: whether the host is this one; then there is no ssh.
    """

    def __init__(self, name: str, ssh_port: int | None = None, identity: str | None = None) -> None:
        self.name = name
        self.here = is_local(name)
        self._unread = b""
        self._lost = ""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe could fill up and block the process)
        checks = Checks(ssh_port, identity, _command())
        self._process = processes.start(
            _with_remote_shell(command_on(name, checks, here=self.here, seconds=_CONNECT)),
            config.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
        )

    def send(self, question: str, *about: Any) -> None:
        """Ask a question without waiting for the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(json.dumps({"ask": question, "about": about}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, deadline: float) -> Any:
        """Return the answer to the last question.

        Args:
            deadline: in terms of ``time.monotonic()``.

        Raises:
            LaunchError: the host did not answer in time, or answered with an error.
        """
        if self._lost:
            raise LaunchError(self.name, self._lost)
        began = time.monotonic()
        while True:
            line = self._line(deadline)
            if line is None:
                self.kill()  # a late answer must not be taken for the answer to the next question
                self._lost = f"no answer in {time.monotonic() - began:.0f} s"
                raise LaunchError(self.name, self._lost)
            if line.startswith(MARK):
                message = json.loads(line.removeprefix(MARK))
                if "error" in message:
                    raise LaunchError(self.name, message["error"])
                return message["answer"]

    def close(self) -> None:
        """End the process, after it has removed its test files."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLEANING)
        self.kill()
        self._stderr.close()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill_group()
        self._process.ends()

    def _line(self, deadline: float) -> str | None:
        """Return the next line of the process's output; None if there is none before the deadline."""
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise LaunchError(self.name, self._last_words())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _last_words(self) -> str:
        how = processes.describe(self._process.wait())
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        return next(
            (line.strip() for line in reversed(lines) if line.strip()), f"its process ended with {how}"
        )


class Agents:
    """One agent for each host; a context manager that ends all of them.

    Args:
        names: the hosts.
        ssh_port: port of the ssh servers, or None for the default of ssh.
        identity: file of ssh's private key, or None.

    Attributes:
        local: names of this host, for which there is no ssh.
        answers: question to host to the last answer, or to ``{"error": reason}``.
    """

    def __init__(self, names: Sequence[str], ssh_port: int | None, identity: str | None) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self._agents: dict[str, Agent] = {}
        try:
            for name in names:
                self._agents[name] = Agent(name, ssh_port, identity)
        except BaseException:
            self.__exit__()
            raise
        self.local = [name for name, agent in self._agents.items() if agent.here]

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self._agents.values():
            agent.close()

    def ask(self, question: str, about: Mapping[str, tuple[Any, ...]], timeout: float) -> dict[str, Any]:
        """Ask several hosts at the same time.

        Args:
            question: the method of `hvdrecover.doctor.host.Host` to call.
            about: host to the method's arguments.
            timeout: seconds for all hosts together.

        Returns:
            Host to its answer, or to the LaunchError that came instead.
        """
        deadline = time.monotonic() + timeout
        for name, arguments in about.items():
            self._agents[name].send(question, *arguments)
        found: dict[str, Any] = {}
        for name in about:
            try:
                found[name] = self._agents[name].answer(deadline)
            except LaunchError as error:
                found[name] = error
            failed = isinstance(found[name], LaunchError)
            told = {"error": found[name].problem} if failed else found[name]
            self.answers.setdefault(question, {})[name] = told
        return found

    def require(self, question: str, about: Mapping[str, tuple[Any, ...]], timeout: float) -> dict[str, Any]:
        """Ask several hosts, all of which have to answer; as `ask`.

        Raises:
            LaunchError: a host did not answer in time, or answered with an error.
        """
        found = self.ask(question, about, timeout)
        for answer in found.values():
            if isinstance(answer, LaunchError):
                raise answer
        return found


def passed_on() -> dict[str, str]:
    """Return the environment variables that ``horovodrun`` would pass on to other hosts."""
    environ = config.environment()
    return {name: value for name, value in environ.items() if not name.startswith(_NOT_PASSED_ON)}


def _with_remote_shell(command: list[str]) -> list[str]:
    """Replace ssh by the program with which jobs start processes on other hosts, if one is configured."""
    settings = config.read()
    if not settings.remote_shell or command[0] != "ssh":
        return command
    return [*remote_shells.command(settings.remote_shell, settings.path), *command[1:]]


def _command() -> str:
    """Return the shell command for a host: the same Python in the same folder, if that exists there."""
    environ = config.environment()
    variables = [f"{name}={environ[name]}" for name in _NEEDED if name in environ]
    words = ["env", *variables, sys.executable, "-m", "hvdrecover.doctor.host"]
    return f"cd {shlex.quote(os.fspath(Path.cwd()))} 2>/dev/null; exec {shlex.join(words)}"
