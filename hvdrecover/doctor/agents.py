"""Ask hosts questions: each is one process of ``hvdrecover.doctor.host`` there, which answers and ends.

The process is started by ssh as ``horovodrun`` would start a rank, so this tests ssh itself.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hvdrecover import config
from hvdrecover.discovery.checks import Checks, command_on, is_local
from hvdrecover.doctor.host import MARK
from hvdrecover.errors import LaunchError
from hvdrecover.launch import processes, ssh

_CONNECT = 15.0  # seconds for a busy host's ssh server to answer
_NEEDED = (
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
)  # before Python starts; the other variables come with the question
_NOT_PASSED_ON = ("BASH_FUNC_", "OLDPWD", "SSH_")  # variables that `horovodrun` keeps from other hosts


class Agents:
    """Asks hosts.

    Args:
        names: the hosts.
        ssh_port: port of the ssh servers, or None for the default of ssh.
        identity: file of ssh's private key, or None.

    Attributes:
        local: names of this host, for which there is no ssh.
        answers: question to host to the last answer, or to ``{"error": reason}``.
    """

    def __init__(self, names: Sequence[str], ssh_port: int | None, identity: str | None) -> None:
        self.local = [name for name in names if is_local(name)]
        self.answers: dict[str, dict[str, Any]] = {}
        self._checks = Checks(ssh_port, identity, _command())

    def ask(self, question: str, about: Mapping[str, Sequence[Any]], seconds: float) -> dict[str, Any]:
        """Ask several hosts at the same time."""
        began, asked = time.monotonic(), self.answers.setdefault(question, {})
        agents: dict[str, tuple[processes.Child, IO[bytes], IO[bytes]]] = {}
        found: dict[str, Any] = {}
        try:
            for name, arguments in about.items():
                agents[name] = self._start(name, question, arguments)
            for name, (process, output, errors) in agents.items():
                try:
                    if not process.ends(max(0.0, began + seconds - time.monotonic())):
                        raise LaunchError(name, f"no answer in {time.monotonic() - began:.0f} s")
                    found[name] = asked[name] = _answer(name, process, output, errors)
                except LaunchError as error:
                    found[name], asked[name] = error, {"error": error.problem}
        finally:
            for process, *files in agents.values():
                process.kill_group()
                process.ends()
                for file in files:
                    file.close()
        return found

    def require(self, question: str, about: Mapping[str, Sequence[Any]], seconds: float) -> dict[str, Any]:
        """Ask several hosts as `ask` does. Raises the LaunchError of a host that does not answer."""
        found = self.ask(question, about, seconds)
        for answer in found.values():
            if isinstance(answer, LaunchError):
                raise answer
        return found

    def _start(
        self, name: str, question: str, about: Sequence[Any]
    ) -> tuple[processes.Child, IO[bytes], IO[bytes]]:
        here, settings, environ = name in self.local, config.read(), config.environment()
        words = command_on(name, self._checks, here=here, seconds=_CONNECT)
        if settings.remote_shell and not here:  # instead of ssh, as for ranks
            words = [*ssh.remote_shell(settings.remote_shell, settings.path), *words[1:]]
        passed_on = {k: v for k, v in environ.items() if not here and not k.startswith(_NOT_PASSED_ON)}
        output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  (`ask` closes them)
        with tempfile.TemporaryFile() as asked:
            asked.write(json.dumps({"variables": passed_on, "ask": question, "about": about}).encode())
            asked.seek(0)
            return processes.start(words, environ, stdin=asked, stdout=output, stderr=errors), output, errors


def _answer(name: str, process: processes.Child, output: IO[bytes], errors: IO[bytes]) -> Any:
    for line in _lines(output):  # login scripts may print other lines
        if line.startswith(MARK):
            message = json.loads(line.removeprefix(MARK))
            if "error" in message:
                raise LaunchError(name, message["error"])
            return message["answer"]
    ended = f"its process ended with {processes.describe(process.wait())}"
    raise LaunchError(name, next((line for line in reversed(_lines(errors)) if line), ended))


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").split("\n")]


def _command() -> str:
    """Return the shell command for a host: the same Python in the same folder, if that exists there."""
    environ = config.environment()
    variables = [f"{name}={environ[name]}" for name in _NEEDED if name in environ]
    words = ["env", *variables, sys.executable, "-m", "hvdrecover.doctor.host"]
    return f"cd {shlex.quote(os.fspath(Path.cwd()))} 2>/dev/null; exec {shlex.join(words)}"
