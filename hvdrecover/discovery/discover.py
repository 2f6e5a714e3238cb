"""One call of host discovery: an answer in bounded time, from the source or from what is remembered."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.discovery import asking, cooldown, selection
from hvdrecover.discovery.asking import Question
from hvdrecover.discovery.checks import Checks
from hvdrecover.discovery.history import History, HistoryFile
from hvdrecover.discovery.selection import Answer, Limits
from hvdrecover.discovery.sources.interface import Source

# Variables that differ from one start of a job to the next, and say nothing of its hosts.
_OF_A_START = re.compile(
    r"(_?HOROVOD_|HVDRECOVER_|SSH_)|(_|PATH|PWD|OLDPWD|SHLVL|INVOCATION_ID|JOURNAL_STREAM|TERM|COLUMNS|LINES)\Z"
)
PATIENCE = 0.5  # seconds for which a call waits for the source if it has an answer already


@dataclass(frozen=True)
class Settings:
    """The user's settings of host discovery.

    Attributes:
        limits: what is wanted of the hosts.
        checks: how they are checked.
        timeout: seconds within which each call answers.
        cache: folder of the files that calls share.
        reports: file in which the supervisor reports hosts that fail; None for none.
    """

    cache: Path
    limits: Limits = field(default_factory=Limits)
    checks: Checks = field(default_factory=Checks)
    timeout: float = 5.0
    reports: Path | None = None


def discover(
    name: str,
    source: Source,
    settings: Settings,
    environ: Mapping[str, str],
    *,
    patient: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Answer:
    """Find out which hosts there are.

    Args:
        name: what to call the source.
        source: whom to ask.
        settings: what the user decides.
        environ: the environment.
        patient: whether to wait for the source and for checks even if there is an answer already.
        clock: where times come from.

    Raises:
        DiscoveryError: there is no good answer; the message says why.
    """
    question = Question(source, settings.checks, environ, settings.timeout)
    file = HistoryFile(settings.cache / f"{_key(question)}.json")
    history, problem, late = file.read(), "", False
    if patient or not asking.is_fresh(history, question, clock.now()):
        usable = not patient and _is_usable(history, question, settings.limits, clock.now())
        patience = min(PATIENCE, settings.timeout) if usable else settings.timeout
        report = asking.ask(question, file, clock, patience=patience, checked=not usable)
        if report is not None:
            history, problem = report.history, report.problem
        else:
            history = file.read()
            late = _is_overdue(history, question, clock.now())
    reports = cooldown.read(settings.reports)
    found = selection.answer(
        history, settings.limits, reports, clock.now(), source=name, checked=settings.checks.any, late=late
    )
    return replace(found, warning=found.warning or problem)


def _is_usable(history: History, question: Question, limits: Limits, now: float) -> bool:
    """Return whether what is remembered is an answer, should the source fail now."""
    if history.listed is None or not 0 <= now - history.listed <= limits.last_good:
        return False
    return history.healthy_at is not None or not question.checks.any


def _is_overdue(history: History, question: Question, now: float) -> bool:
    """Return whether the source hangs, so that not even its failure is known."""
    limit = question.source.every + question.timeout
    return history.asked is None or not 0 <= now - history.asked <= limit


def _key(question: Question) -> str:
    """Return the key under which the history of a question is kept.

    A relative path is another file elsewhere, and a folder for caches may be shared by hosts.
    """
    source, environ = question.source, question.environ
    names = source.variables
    if "*" in names:
        names = tuple(name for name in sorted(environ) if not _OF_A_START.match(name))
    variables = {name: environ.get(name) for name in names}
    place = socket.gethostname(), str(Path("/proc/self/cwd").readlink())  # also of a folder that is deleted
    text = f"{type(source).__module__}.{source!r} {question.checks!r} {variables!r} {place!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
