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

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hvdrecover.discovery import selection
from hvdrecover.discovery.selection import Answer, Checks, Health, History, Settings
from hvdrecover.discovery.sources import Host, Source, check, output_of
from hvdrecover.errors import DiscoveryError
from hvdrecover.machine import Bounded, is_local

CONNECT = 2.0  # seconds for a host to answer
PATIENCE = 0.5  # seconds for which a call waits for a newer answer if it has a usable one
_FOR_CHECKS = 0.6  # of the timeout, so that checks end in time if the source is quick
_MARGIN = 0.5  # seconds for a source to report its own timeout
_BACKSTOP = 2.0  # seconds after which the kernel kills an asking process that does not end
_KEPT = 2 * 86400.0  # seconds after which the history of another job is deleted
_KILLING = 0.25  # seconds to kill a check that hangs
_AT_ONCE = 256  # hosts; each check may take a socket or a process
# horovodrun's own options for ssh, which must not wait for a person either.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no")
_PREFIX = "hvdrecover-hosts-"  # of history files: the folder may be the user's, with other files in it
# Variables that differ between starts of one job, and have no influence on its hosts.
_OF_A_START = re.compile(
    r"(_?HOROVOD_|HVDRECOVER_|SSH_)|(_|PATH|PWD|OLDPWD|SHLVL|INVOCATION_ID|JOURNAL_STREAM|TERM|COLUMNS|LINES)\Z"
)


def discover(
    name: str, source: Source, settings: Settings, environ: Mapping[str, str], *, patient: bool = False
) -> Answer:
    """Return the hosts; if `patient`, wait for the source and the checks even if there is a usable answer."""
    file = settings.cache / f"{_PREFIX}{_key(name, source, settings.checks, environ)}.json"
    known = read(file)
    if patient or not _is_fresh(known, source):
        good = known.listed is not None and 0 <= time.time() - known.listed <= settings.last_good
        passed = not settings.checks.any or any(each.passed for each in known.health.values())
        usable = good and passed and not patient
        patience = min(PATIENCE, settings.timeout) if usable else settings.timeout
        news = _Asking(source, settings, environ, file).start(patience, wait_for_checks=not usable)
        known = _loads(news) if news else read(file)
        # Even a failure is known by now, unless the source hangs.
        if not 0 <= time.time() - (known.asked or 0.0) <= source.every + settings.timeout:
            known = replace(known, failure=known.failure or "has not answered in time")
    reports = selection.read_reports(settings.reports)
    return selection.answer(name, known, settings, reports, time.time())


def read(file: Path) -> History:
    try:
        return _loads(file.read_bytes())
    except OSError:
        return History()


def _loads(text: bytes) -> History:
    try:
        values = json.loads(text)
        values["health"] = {name: Health(**each) for name, each in values["health"].items()}
        return History(**values)
    except (ValueError, TypeError, KeyError, AttributeError):  # damaged, or of another version
        return History()


def _dumps(history: History) -> bytes:
    return json.dumps(dataclasses.asdict(history)).encode()


def _key(name: str, source: Source, checks_: Checks, environ: Mapping[str, str]) -> str:
    """Return the part of a history file's name that differs between sources, jobs and hosts."""
    names = source.variables
    if "*" in names:
        names = tuple(each for each in sorted(environ) if not _OF_A_START.match(each))
    variables = {each: environ.get(each) for each in names}
    # Paths are relative to the working folder, which may be deleted by now. Hosts may share the cache.
    place = socket.gethostname(), str(Path("/proc/self/cwd").readlink())
    text = f"{name} {source.options!r} {checks_!r} {variables!r} {place!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_fresh(known: History, source: Source) -> bool:
    return known.listed is not None and 0 <= time.time() - (known.asked or 0.0) < source.every


@dataclass(frozen=True)
class _Asking:
    """Ask the source and check its hosts, in a detached process."""

    source: Source
    settings: Settings
    environ: Mapping[str, str]
    file: Path

    def start(self, patience: float, *, wait_for_checks: bool) -> bytes:
        """Start the process, and return the history that it sends within `patience` seconds, or nothing."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:  # the grandchild has no parent that would have to wait for it
                    self._detach(writer)
                    self._run(writer, wait_for_checks=wait_for_checks)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        text, deadline = b"", time.monotonic() + patience
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while (left := deadline - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
                if not (part := pipe.read(1 << 16)):
                    return text
                text += part
        return b""

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

    def _run(self, writer: int, *, wait_for_checks: bool) -> None:
        """Ask, write, check, write; send the history after the first or the second of the two writes."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            lock = self.file.with_suffix(".lock").open("wb")  # the kernel releases it when this process ends
            # A call that waits for checks also waits for another process that asks just now.
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait_for_checks else fcntl.LOCK_NB))
        except BlockingIOError:  # another process asks just now
            return
        except OSError:  # without a lock, each call asks
            pass
        known = read(self.file)
        if known.asked is None:
            self._delete_old_files()
        if not _is_fresh(known, self.source):  # no other process has asked meanwhile
            known = self._write(self._ask(known))
        if not wait_for_checks:
            _send(writer, known)
        if self.settings.checks.any:
            known = self._write(self._check(known))
        if wait_for_checks:
            _send(writer, known)

    def _ask(self, known: History) -> History:
        """Return the history after the source was asked, which may hang."""
        timeout, hosts = self.settings.timeout, list[Host]()
        try:
            hosts = Bounded(timeout + _MARGIN)(self.source, self.environ, timeout)
            names = [host.name for host in hosts]
            twice = (f"'{name}' is named twice" for name in names if names.count(name) > 1)
            failure = next(filter(None, (check(host.name, host.slots) for host in hosts)), next(twice, ""))
        except TimeoutError:
            failure = f"it has not answered in {timeout:g} s"
        except DiscoveryError as error:
            failure = str(error)
        except Exception as error:  # the source may be another package's
            failure = f"{type(error).__name__}: {error}"
        now = time.time()
        if failure:
            return replace(known, asked=now, failure=failure, empty=False)
        if not hosts:
            hint = f"; {self.source.if_empty}" if self.source.if_empty else ""
            return replace(known, asked=now, failure=f"it names no host{hint}", empty=True)
        slots = {host.name: host.slots for host in hosts}
        first_seen = {name: known.first_seen.get(name, now) for name in slots}
        health = {name: each for name, each in known.health.items() if name in slots}
        return History(slots, now, now, first_seen=first_seen, health=health)

    def _check(self, known: History) -> History:
        now = time.time()
        due = [name for name in known.hosts if selection.check_is_due(known.health.get(name), now)]
        # Hosts that were never checked first, then those with the oldest check.
        due.sort(key=lambda name: before.checked if (before := known.health.get(name)) else 0.0)
        problems = _check_hosts(due, self.settings.checks, self.environ, self.settings.timeout * _FOR_CHECKS)
        now = time.time()
        checked = {
            name: selection.health_after(known.health.get(name), each, now) for name, each in problems.items()
        }
        return replace(known, health={**known.health, **checked})

    def _write(self, known: History) -> History:
        """Replace the history file. Return the history, with the problem if it cannot be written."""
        known = replace(known, unwritable="")
        new = self.file.with_suffix(f".{os.getpid()}")
        try:
            new.write_bytes(_dumps(known))
            new.replace(self.file)
        except OSError as error:
            with suppress(OSError):
                new.unlink()
            where = f"{error.filename}: " if error.filename else ""
            problem = f"the cache of host discovery cannot be written: {where}{error.strerror}"
            return replace(known, unwritable=problem)
        return known

    def _delete_old_files(self) -> None:
        with suppress(OSError):
            for path in self.file.parent.glob(f"{_PREFIX}*"):
                if time.time() - path.stat().st_mtime > _KEPT:
                    path.unlink()


def _send(writer: int, known: History) -> None:
    with suppress(BrokenPipeError), os.fdopen(writer, "wb") as pipe:  # the caller may have returned already
        pipe.write(_dumps(known))


# -- checks of hosts -----------------------------------------------------------------------------------


def _check_hosts(
    names: Sequence[str], checks: Checks, environ: Mapping[str, str], timeout: float
) -> dict[str, str]:
    """Check all hosts at once, within `timeout` seconds; return the problem of each host, '' if it passed."""
    margin = min(_KILLING, timeout / 4)
    deadline = time.monotonic() + timeout - margin
    pool = ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(names))))
    futures = {name: pool.submit(_problem_of, name, checks, environ, deadline) for name in names}
    wait(futures.values(), timeout - margin)
    # Threads may still wait for a host, so the calling process should end soon, by `os._exit`.
    pool.shutdown(wait=False, cancel_futures=True)
    wait([each for each in futures.values() if each.running()], margin)
    # A host whose check has not begun in time is missing in the answer.
    begun = {name: future for name, future in futures.items() if not future.cancelled()}
    late = f"no answer in {timeout:.2g} s"
    return {name: future.result() if future.done() else late for name, future in begun.items()}


def _problem_of(name: str, checks: Checks, environ: Mapping[str, str], deadline: float) -> str:
    here = is_local(name)
    if checks.ssh_port is not None and not here:
        timeout = max(0.01, min(CONNECT, deadline - time.monotonic()))
        try:
            socket.create_connection((name, checks.ssh_port), timeout).close()
        except OSError as error:
            return f"port {checks.ssh_port} (ssh): {error.strerror or error}"
    if checks.command is None:
        return ""
    try:
        command = command_on(name, checks, here=here)
        output_of(command, environ, max(0.01, deadline - time.monotonic()))
    except DiscoveryError as error:
        return f"'{checks.command}' {error.problem}"
    return ""


def command_on(name: str, checks: Checks, *, here: bool, seconds: float = CONNECT) -> list[str]:
    """Return the command that runs the check: by the shell, or by ssh with ``seconds`` to connect."""
    if here:
        return ["sh", "-c", str(checks.command)]
    words = [*_SSH, "-o", f"ConnectTimeout={seconds:.0f}"]
    if checks.ssh_port is not None:
        words += ["-p", str(checks.ssh_port)]
    if checks.identity is not None:
        words += ["-i", checks.identity]
    return [*words, name, str(checks.command)]
