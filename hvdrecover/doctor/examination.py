"""All checks, in order: ask the hosts, and pass the answers to ``checks.py``.

Each question is one process of ``hvdrecover.doctor.host`` on a host, which answers and ends. The process is
started by ssh as ``horovodrun`` would start a rank, so this tests ssh itself.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdrecover import config
from hvdrecover.discovery.discover import command_on
from hvdrecover.discovery.selection import Checks
from hvdrecover.doctor import checks
from hvdrecover.doctor.checks import Finding
from hvdrecover.doctor.host import MARK, Facts
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.install.build import ended_by_exception
from hvdrecover.launch import processes, ssh
from hvdrecover.machine import is_local

_CONNECT = 15.0  # seconds for a busy host's ssh server to answer
_NEEDED = ("PYTHONPATH", "LD_LIBRARY_PATH")  # to start Python; the other variables come with the question
_NOT_PASSED_ON = ("BASH_FUNC_", "OLDPWD", "SSH_")  # variables that `horovodrun` keeps from other hosts
# Seconds after which an answer counts as missing.
_FACTS = 300.0  # ssh, the start of Python, and importing all frameworks
_QUESTION = 30.0
_STORAGE = 120.0


@dataclass(frozen=True)
class Settings:
    """What to examine."""

    hosts: Mapping[str, int]  # host to its number of slots, in the order in which a job would use them
    processes: int  # number of ranks of the job
    interfaces: tuple[str, ...] = ()  # network interfaces that the job would use; empty if any
    ssh_port: int | None = None  # None for the default of ssh
    identity: str | None = None  # file of ssh's private key
    checkpoint: str | None = None  # the checkpoint root
    state: int | None = None  # size of the training state in bytes; None if unknown

    def ranks(self) -> dict[str, int]:
        """Return host to its number of ranks. The first hosts are filled first.

        Raises `ConfigError` if the hosts have too few slots.
        """
        left, found = self.processes, {}
        for host, slots in self.hosts.items():
            if left > 0:
                found[host] = min(slots, left)
                left -= found[host]
        if left > 0:
            slots = sum(self.hosts.values())
            raise ConfigError("-np", f"{self.processes} processes are more than the hosts' {slots} slots")
        return found


@dataclass(frozen=True)
class Report:
    """The result of all checks."""

    ok: bool
    ranks: Mapping[str, int]
    findings: Sequence[Finding]


def examine(settings: Settings, notify: Callable[[str], None], *, hosts_only: bool = False) -> Report:
    """Make all checks; ``hosts_only`` leaves out storage and memory, as ``run --preflight`` does."""
    examination = Examination(settings)
    with ended_by_exception():
        notify("hosts")
        findings = list(examination.hosts())
        if not hosts_only:
            notify("storage")
            findings += examination.storage()
        ok = all(finding.outcome != "failure" for finding in findings)
        return Report(ok, settings.ranks(), findings)


class Examination:
    """The conversation with all hosts. Only hosts that answer the first question are asked more."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ranks = settings.ranks()
        self._local = [name for name in self._ranks if is_local(name)]  # names of this host: without ssh
        self._facts: dict[str, Facts] = {}

    def hosts(self) -> Iterator[Finding]:
        asked = {host: (host, [*self._ranks]) for host in self._ranks}
        answers = self.ask("facts", asked, _FACTS)
        problems = {h: each.problem if isinstance(each, LaunchError) else "" for h, each in answers.items()}
        self._facts = {host: Facts(**answers[host]) for host, problem in problems.items() if not problem}
        yield from checks.check_ssh(problems, self._local)
        if not self._facts:
            return
        yield checks.check_versions(self._facts)
        yield from checks.check_horovod(self._facts)
        for check, look in ((checks.NETWORK, self._network), (checks.CLOCKS, self._clocks)):
            if len(self._facts) < 2 or set(self._facts) <= set(self._local):
                lost = len(self._facts) < len(self._ranks)
                why = "it takes two hosts that answer" if lost else "this host only"
                yield Finding(check, "skipped", why)
                continue
            try:
                yield look()
            except LaunchError as error:
                remedy = "Repair this host, then run `hvdrecover doctor` again."
                yield Finding(check, "failure", str(error).rstrip("."), remedy, [error.program])

    def storage(self) -> Iterator[Finding]:
        yield from self._root()
        if self._facts:
            yield checks.check_memory(self._facts, self._ranks, self._settings.state)

    def _network(self) -> Finding:
        own = {host: self._interface(host) for host in self._facts}
        ports = {host: (own[host][1], each.port) for host, each in self._facts.items()}
        asked = {
            host: (each.port, {peer: port for peer, port in ports.items() if peer != host})
            for host, each in self._facts.items()
        }
        return checks.check_network(own, _all_of(self.ask("reach", asked, _QUESTION)))

    def _interface(self, host: str) -> tuple[str, str]:
        """Return a host's interface that leads to the other hosts, and its address; empty if unknown."""
        facts = self._facts[host]
        if wanted := self._settings.interfaces:
            return next(
                ((each, facts.interfaces[each]) for each in wanted if each in facts.interfaces), ("", "")
            )
        # A host that does not know the other hosts' names may be known to them.
        known = [each.addresses[host] for each in self._facts.values() if host in each.addresses]
        address = next(filter(None, [facts.source, *known]), "")
        return next((name for name, each in facts.interfaces.items() if each == address), ""), address

    def _clocks(self) -> Finding:
        """Read all clocks. Each was read between question and answer, so their middle is close to it."""
        asked = time.time()
        read = _all_of(self.ask("clock", dict.fromkeys(self._facts, ()), _QUESTION))
        error = (time.time() - asked) / 2
        return checks.check_clocks({host: each - asked - error for host, each in read.items()}, error)

    def _root(self) -> Iterator[Finding]:
        """Try out the root from the first host, where rank 0 would write."""
        url, host = self._settings.checkpoint, next(iter(self._ranks))
        if url is None:
            what = "no root is named; --checkpoint or HVDRECOVER_CHECKPOINT names it"
            yield Finding(checks.ROOT, "skipped", what)
            return
        if host not in self._facts:
            what = f"{host}, which would write to it, does not answer"
            yield Finding(checks.ROOT, "skipped", what)
            return
        found = self.ask("root", {host: (url,)}, _STORAGE)[host]
        if isinstance(found, LaunchError):
            remedy = "Check the URL, and install the packages that it needs."
            yield Finding(checks.ROOT, "failure", str(found).rstrip("."), remedy, [host])
            return
        asked = {each: (url, found["folder"]) for each in self._facts if each != host}
        seen = {} if found["problem"] else self.ask("see", asked, _STORAGE)
        cleaned = self.ask("clean", {host: (url, found["folder"], found["made"])}, _STORAGE)[host]
        if isinstance(cleaned, LaunchError) and not found["problem"]:
            found["problem"] = f"its test files cannot be deleted ({cleaned.problem})"
        yield checks.check_root(found, time.time())
        yield checks.check_writing(found["problem"], host)
        yield checks.check_space(found["free"], self._settings.state)
        if not found["problem"]:
            yield checks.check_shared(seen, host)

    # -- questions -------------------------------------------------------------------------------------

    def ask(self, question: str, about: Mapping[str, Sequence[Any]], seconds: float) -> dict[str, Any]:
        """Ask several hosts at the same time; return host to its answer, or to its LaunchError."""

        def ask(name: str) -> Any:
            try:
                return self._ask(name, question, about[name], seconds)
            except LaunchError as error:
                return error

        with ThreadPoolExecutor(max(1, len(about))) as pool:
            return dict(zip(about, pool.map(ask, about), strict=True))

    def _ask(self, name: str, question: str, about: Sequence[Any], seconds: float) -> Any:
        here, settings, environ = name in self._local, config.read(), config.environment()
        command = Checks(self._settings.ssh_port, self._settings.identity, _command())
        words = command_on(name, command, here=here, seconds=_CONNECT)
        if settings.remote_shell and not here:  # instead of ssh, as for ranks
            words = [*ssh.remote_shell(settings.remote_shell, settings.path), *words[1:]]
        passed_on = {k: v for k, v in environ.items() if not here and not k.startswith(_NOT_PASSED_ON)}
        asked, pipe = {"variables": passed_on, "ask": question, "about": about}, subprocess.PIPE
        process = processes.start(words, environ, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            output, errors = process.communicate(json.dumps(asked).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            raise LaunchError(name, f"no answer in {seconds:.0f} s") from None
        finally:
            process.kill_group()
            process.ends()
        for line in _lines(output):  # login scripts may print other lines
            if line.startswith(MARK):
                message = json.loads(line.removeprefix(MARK))
                if "error" in message:
                    raise LaunchError(name, message["error"])
                return message["answer"]
        ended = f"its process ended with {processes.describe(process.wait())}"
        raise LaunchError(name, next((line for line in reversed(_lines(errors)) if line), ended))


def _all_of(answers: dict[str, Any]) -> dict[str, Any]:
    """Return the answers. Raise the LaunchError of a host that has not answered."""
    for answer in answers.values():
        if isinstance(answer, LaunchError):
            raise answer
    return answers


def _lines(output: bytes) -> list[str]:
    return [line.strip() for line in output.decode(errors="replace").split("\n")]


def _command() -> str:
    """Return the shell command for a host: the same Python in the same folder, if that exists there."""
    environ = config.environment()
    variables = [f"{name}={environ[name]}" for name in _NEEDED if name in environ]
    words = ["env", *variables, sys.executable, "-m", "hvdrecover.doctor.host"]
    return f"cd {shlex.quote(os.fspath(Path.cwd()))} 2>/dev/null; exec {shlex.join(words)}"
