"""Asking the source, and checking its hosts, in a process of its own, so that nothing can hold up the answer.

Horovod's driver holds a lock while discovery runs, which recoveries need. So only the first call waits for
checks; later ones go by what is known, while the process continues to check.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from hvdrecover.clock import Clock
from hvdrecover.discovery import checks, health
from hvdrecover.discovery.checks import Checks
from hvdrecover.discovery.history import History, HistoryFile, dumps, loads
from hvdrecover.discovery.hosts import Host, nonsense
from hvdrecover.discovery.sources.interface import Source
from hvdrecover.errors import DiscoveryError

_FOR_CHECKS = 0.6  # of the time, so that they end in time if the source is quick
_MARGIN = 0.5  # seconds for a source to say itself that it was too slow
_BACKSTOP = 2.0  # seconds beyond its time after which the kernel kills a process that does not end


@dataclass(frozen=True)
class Question:
    """The question.

    Attributes:
        source: whom to ask.
        checks: what to check of its hosts.
        environ: the environment.
        timeout: seconds that it may take.
    """

    source: Source
    checks: Checks
    environ: Mapping[str, str]
    timeout: float


def is_fresh(history: History, question: Question, now: float) -> bool:
    """Return whether what is known need not be asked for again."""
    if history.listed is None or history.asked is None:
        return False
    return 0 <= now - history.asked < question.source.every


@dataclass(frozen=True)
class Report:
    """The answer.

    Attributes:
        history: what is known now.
        problem: why it can't be remembered; an empty string if it can.
    """

    history: History
    problem: str = ""


def ask(
    question: Question, file: HistoryFile, clock: Clock, *, patience: float, checked: bool
) -> Report | None:
    """Have the source asked, and its answer and what checks find remembered.

    Args:
        question: what to find out.
        file: where to remember it.
        clock: where times come from.
        patience: seconds to wait.
        checked: whether to wait for the checks, and for others who ask just now.

    Returns:
        What was found out; None if that takes longer, or others are at it. It continues in any case.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:  # who has lost its parent, and is nobody's to wait for
                _be_detached(writer, question)
                _answer(question, file, clock, writer, wait=checked)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    wanted, deadline = 2 if checked else 1, time.monotonic() + patience
    seen = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while seen.count(b"\n") < wanted and (left := deadline - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                news = pipe.read(1 << 16)
                if not news:
                    break
                seen += news
    lines = seen.split(b"\n")[:-1]
    if len(lines) < wanted:
        return None
    problem, _, history = lines[-1].partition(b"\t")
    return Report(loads(history), problem.decode())


def _be_detached(writer: int, question: Question) -> None:
    """Be no part of what the caller started, or it would be waited for."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, question.timeout * (1 + _FOR_CHECKS) + _BACKSTOP)


def _answer(question: Question, file: HistoryFile, clock: Clock, writer: int, *, wait: bool) -> None:
    with ExitStack() as held:
        problem = ""
        try:
            held.enter_context(file.lock(wait=wait))
        except BlockingIOError:
            return
        except OSError as error:
            problem = _unwritable(error)
        history = file.read()
        if history.asked is None:
            file.forget_others(clock.now())
        if not is_fresh(history, question, clock.now()):  # nobody has done it meanwhile
            history = asked(history, question, clock)
            problem = _keep(history, file) or problem
        _send(writer, history, problem)
        if question.checks.any:
            history = checked(history, question, clock)
            problem = _keep(history, file) or problem
        _send(writer, history, problem)


def _keep(history: History, file: HistoryFile) -> str:
    try:
        file.write(history)
    except OSError as error:
        return _unwritable(error)
    return ""


def _unwritable(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"the cache can't be written, so that no answer is remembered: {where}{error.strerror}"


def _send(writer: int, history: History, problem: str) -> None:
    with suppress(BrokenPipeError):  # the caller has answered already
        with os.fdopen(writer, "wb", closefd=False) as pipe:
            pipe.write(problem.encode() + b"\t" + dumps(history) + b"\n")


def asked(history: History, question: Question, clock: Clock) -> History:
    """Return what is known after the source was asked."""
    hosts, failure = _hosts(question)
    now = clock.now()
    if failure or not hosts:
        problem = failure or "it names no host"
        return replace(history, asked=now, failure=problem, empty=not failure)
    names = [host.name for host in hosts]
    seen = {name: history.first_seen.get(name, now) for name in names}
    known = {name: each for name, each in history.health.items() if name in seen}
    return replace(
        history,
        hosts=tuple(hosts),
        listed=now,
        asked=now,
        failure="",
        empty=False,
        first_seen=seen,
        health=known,
    )


def _hosts(question: Question) -> tuple[list[Host], str]:
    """Return what the source names, or what is wrong with it; on a thread, as it may hang."""
    found: list[Host] = []
    failure = [f"it has not answered in {question.timeout:g} s"]

    def run() -> None:
        try:
            found.extend(question.source.hosts(question.environ, question.timeout))
            failure[0] = ""
        except DiscoveryError as error:
            failure[0] = str(error)
        except Exception as error:  # of a source that somebody else has written
            failure[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(question.timeout + _MARGIN)
    if thread.is_alive() or failure[0]:
        return [], failure[0]
    return found, nonsense(found)


def checked(history: History, question: Question, clock: Clock) -> History:
    """Return what is known after hosts were checked whose turn it is."""
    now = clock.now()
    names = [host.name for host in history.hosts]
    due = [name for name in names if health.is_due(history.health.get(name), now)]
    # Those that were never checked first, then those whose check is longest ago.
    due.sort(key=lambda name: known.checked if (known := history.health.get(name)) else 0.0)
    problems = checks.run(due, question.checks, question.environ, question.timeout * _FOR_CHECKS)
    now = clock.now()
    known = dict(history.health)
    for name, problem in problems.items():
        known[name] = health.judged(known.get(name), problem, now)
    healthy = tuple(name for name in names if name in known and known[name].healthy)
    if not healthy:
        return replace(history, health=known)
    return replace(history, health=known, healthy=healthy, healthy_at=now)
