"""One call of host discovery: an answer in bounded time.

Horovod's driver calls discovery each second while it holds a lock that recoveries need. So:

1. A call that finds a fresh answer in the history file returns it.
2. Else a detached process asks the source, writes the history, checks the hosts, and writes the history
   again. It continues when the call has returned, so a source that hangs delays nobody.
3. A call without any usable answer waits for the process, for the whole timeout. A call that has an older
   answer waits for `PATIENCE` only, and does not wait for checks.

The history file is shared by all calls. Only the holder of its lock writes it. It is replaced as a whole, so
readers need no lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import select
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdrecover.clock import SYSTEM_CLOCK, Bounded, Clock
from hvdrecover.discovery import checks, history, selection
from hvdrecover.discovery.checks import Checks
from hvdrecover.discovery.history import History
from hvdrecover.discovery.hosts import Host, check_hosts
from hvdrecover.discovery.selection import Answer, Limits
from hvdrecover.discovery.sources import Source
from hvdrecover.errors import DiscoveryError

PATIENCE = 0.5  # seconds for which a call waits for a newer answer if it has a usable one
_FOR_CHECKS = 0.6  # of the timeout, so that checks end in time if the source is quick
_MARGIN = 0.5  # seconds for a source to report its own timeout
_BACKSTOP = 2.0  # seconds after which the kernel kills an asking process that does not end
_KEPT = 2 * 86400.0  # seconds after which the history of another job is deleted
# Variables that differ between starts of one job, and have no influence on its hosts.
_OF_A_START = re.compile(
    r"(_?HOROVOD_|HVDRECOVER_|SSH_)|(_|PATH|PWD|OLDPWD|SHLVL|INVOCATION_ID|JOURNAL_STREAM|TERM|COLUMNS|LINES)\Z"
)


@dataclass(frozen=True)
class Settings:
    """The user's settings of host discovery."""

    cache: Path  # folder of the history files
    limits: Limits = field(default_factory=Limits)
    checks: Checks = field(default_factory=Checks)
    timeout: float = 5.0  # seconds within which each call answers
    reports: Path | None = None  # file in which the supervisor reports hosts that fail


def discover(
    name: str,
    source: Source,
    settings: Settings,
    environ: Mapping[str, str],
    *,
    patient: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Answer:
    """Find the hosts.

    Args:
        name: the source's name.
        source: the source to ask.
        settings: the user's settings.
        environ: the environment.
        patient: whether to wait for the source and for checks even if there is a usable answer.
        clock: the source of times.

    Raises:
        DiscoveryError: the source gave no usable answer; the message says why.
    """
    file = settings.cache / f"{_key(name, source, settings.checks, environ)}.json"
    asking = _Asking(source, settings, environ, file, clock)
    known, problem, late = history.read(file), "", False
    if patient or not asking.is_fresh(known):
        usable = not patient and asking.is_usable(known)
        patience = min(PATIENCE, settings.timeout) if usable else settings.timeout
        news = asking.start(patience, wait_for_checks=not usable)
        if news is not None:
            known, problem = news
        else:
            known = history.read(file)
            late = asking.is_overdue(known)
    reports = selection.read_reports(settings.reports)
    found = selection.answer(
        known, settings.limits, reports, clock.now(), source=name, checked=settings.checks.any, late=late
    )
    return replace(found, warning=found.warning or problem)


def _key(name: str, source: Source, checks_: Checks, environ: Mapping[str, str]) -> str:
    """Return the name of the history file.

    It depends on the working folder, to which paths are relative, and on the host: hosts may share a cache.
    """
    names = source.variables
    if "*" in names:
        names = tuple(each for each in sorted(environ) if not _OF_A_START.match(each))
    variables = {each: environ.get(each) for each in names}
    place = socket.gethostname(), str(Path("/proc/self/cwd").readlink())  # exists for a deleted folder, too
    text = f"{name} {source.options!r} {checks_!r} {variables!r} {place!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Asking:
    """Ask the source and check its hosts, in a detached process."""

    source: Source
    settings: Settings
    environ: Mapping[str, str]
    file: Path
    clock: Clock

    def is_fresh(self, known: History) -> bool:
        """Return whether the source was asked so recently that it must not be asked again."""
        if known.listed is None or known.asked is None:
            return False
        return 0 <= self.clock.now() - known.asked < self.source.every

    def is_usable(self, known: History) -> bool:
        """Return whether the history is an answer if the source fails now."""
        age = -1.0 if known.listed is None else self.clock.now() - known.listed
        if not 0 <= age <= self.settings.limits.last_good:
            return False
        return known.healthy_at is not None or not self.settings.checks.any

    def is_overdue(self, known: History) -> bool:
        """Return whether the source hangs: not even its failure is known in time."""
        limit = self.source.every + self.settings.timeout
        return known.asked is None or not 0 <= self.clock.now() - known.asked <= limit

    def start(self, patience: float, *, wait_for_checks: bool) -> tuple[History, str] | None:
        """Start the process and wait for it, for so many seconds at most.

        With `wait_for_checks`, also wait for checks, and for another process that asks just now. Return the
        history, and why it cannot be written or ''; None if there is no answer in time.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:  # the grandchild has no parent that would have to wait for it
                    self._detach(writer)
                    self._run(writer, wait=wait_for_checks)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        wanted = 2 if wait_for_checks and self.settings.checks.any else 1
        text, deadline = b"", time.monotonic() + patience
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while text.count(b"\n") < wanted and (left := deadline - time.monotonic()) > 0:
                if select.select([pipe], [], [], left)[0]:
                    news = pipe.read(1 << 16)
                    if not news:
                        break
                    text += news
        lines = text.split(b"\n")[:-1]
        if len(lines) < wanted:
            return None
        problem, _, known = lines[-1].partition(b"\t")
        return history.loads(known), problem.decode()

    def _detach(self, writer: int) -> None:
        """Leave the caller's session and close its files, or its shell would wait for this process."""
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(devnull, descriptor)
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self.settings.timeout * (1 + _FOR_CHECKS) + _BACKSTOP)

    def _run(self, writer: int, *, wait: bool) -> None:
        """Ask, write, check, write; send the history after each of the two writes."""
        try:
            with self._lock(wait=wait):
                self._ask_and_check(writer, "")
        except BlockingIOError:  # another process asks just now
            return
        except OSError as error:
            self._ask_and_check(writer, _unwritable(error))

    def _ask_and_check(self, writer: int, problem: str) -> None:
        known = history.read(self.file)
        if known.asked is None:
            self._delete_old_files()
        if not self.is_fresh(known):  # no other process has asked meanwhile
            known = self._ask(known)
            problem = self._write(known) or problem
        _send(writer, known, problem)
        if self.settings.checks.any:
            known = self._check(known)
            problem = self._write(known) or problem
            _send(writer, known, problem)

    def _ask(self, known: History) -> History:
        """Return the history after the source was asked."""
        hosts, failure = self._call_source()
        now = self.clock.now()
        if failure or not hosts:
            hint = f"; {self.source.if_empty}" if self.source.if_empty else ""
            nothing = f"it names no host{hint}"
            return replace(known, asked=now, failure=failure or nothing, empty=not failure)
        names = {host.name for host in hosts}
        return replace(
            known,
            hosts=tuple(hosts),
            listed=now,
            asked=now,
            failure="",
            empty=False,
            first_seen={name: known.first_seen.get(name, now) for name in names},
            health={name: each for name, each in known.health.items() if name in names},
        )

    def _call_source(self) -> tuple[list[Host], str]:
        """Return the source's hosts, or its failure. The source may hang."""
        timeout = self.settings.timeout
        try:
            found = Bounded(timeout + _MARGIN)(self.source, self.environ, timeout)
        except TimeoutError:
            return [], f"it has not answered in {timeout:g} s"
        except DiscoveryError as error:
            return [], str(error)
        except Exception as error:  # the source may be another package's
            return [], f"{type(error).__name__}: {error}"
        return found, check_hosts(found)

    def _check(self, known: History) -> History:
        """Return the history after the checks that are due."""
        now = self.clock.now()
        names = [host.name for host in known.hosts]
        due = [name for name in names if checks.is_due(known.health.get(name), now)]
        # Hosts that were never checked first, then those with the oldest check.
        due.sort(key=lambda name: before.checked if (before := known.health.get(name)) else 0.0)
        problems = checks.run(due, self.settings.checks, self.environ, self.settings.timeout * _FOR_CHECKS)
        now = self.clock.now()
        checked = {name: checks.update(known.health.get(name), each, now) for name, each in problems.items()}
        known = replace(known, health={**known.health, **checked})
        healthy = tuple(name for name in names if name in known.health and known.health[name].healthy)
        return replace(known, healthy=healthy, healthy_at=now) if healthy else known

    # -- the history file ------------------------------------------------------------------------------

    def _write(self, known: History) -> str:
        """Replace the history file; return the problem, or ''."""
        name = ""
        try:
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=f"{self.file.name}.")
            with os.fdopen(handle, "wb") as file:
                file.write(history.dumps(known))
            Path(name).replace(self.file)
        except OSError as error:
            with suppress(OSError):
                Path(name).unlink()
            return _unwritable(error)
        return ""

    @contextmanager
    def _lock(self, *, wait: bool) -> Iterator[None]:
        """Hold the lock, which the kernel releases when its holder dies.

        Raises `BlockingIOError` if another process holds it, `OSError` if the folder cannot be written to.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with _lock_of(self.file).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield

    def _delete_old_files(self) -> None:
        """Delete other histories in the folder that have not been written for days."""
        with suppress(OSError):
            for path in self.file.parent.glob("?" * 16 + ".json"):
                # The folder may be the user's, with other files in it.
                if self.clock.now() - path.stat().st_mtime > _KEPT and history.is_one(path.read_bytes()):
                    path.unlink()
                    _lock_of(path).unlink()


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _unwritable(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"the cache of host discovery cannot be written: {where}{error.strerror}"


def _send(writer: int, known: History, problem: str) -> None:
    with suppress(BrokenPipeError):  # the caller has returned already
        with os.fdopen(writer, "wb", closefd=False) as pipe:
            pipe.write(problem.encode() + b"\t" + history.dumps(known) + b"\n")
