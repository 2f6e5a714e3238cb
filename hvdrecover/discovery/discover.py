"""One call of host discovery: an answer in bounded time, from the source or from what is remembered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.discovery import asking, rests, selection
from hvdrecover.discovery.asking import Question
from hvdrecover.discovery.checks import Checks
from hvdrecover.discovery.memory import Memory, MemoryFile
from hvdrecover.discovery.selection import Answer, Limits
from hvdrecover.discovery.sources.interface import Source

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
    file = MemoryFile(settings.cache / f"{_key(question)}.json")
    memory, problem, late = file.read(), "", False
    if patient or not asking.is_fresh(memory, question, clock.now()):
        usable = not patient and _is_usable(memory, question, settings.limits, clock.now())
        patience = min(PATIENCE, settings.timeout) if usable else settings.timeout
        report = asking.ask(question, file, clock, patience=patience, checked=not usable)
        if report is not None:
            memory, problem = report.memory, report.problem
        else:
            memory = file.read()
            late = _is_overdue(memory, question, clock.now())
    reports = rests.read(settings.reports)
    found = selection.answer(
        memory, settings.limits, reports, clock.now(), source=name, checked=settings.checks.any, late=late
    )
    return replace(found, warning=found.warning or problem)


def _is_usable(memory: Memory, question: Question, limits: Limits, now: float) -> bool:
    """Return whether what is remembered is an answer, should the source fail now."""
    if memory.listed is None or not 0 <= now - memory.listed <= limits.last_good:
        return False
    return memory.well_at is not None or not question.checks.any


def _is_overdue(memory: Memory, question: Question, now: float) -> bool:
    """Return whether the source hangs, so that not even its failure is known."""
    limit = question.source.every + question.timeout
    return memory.asked is None or not 0 <= now - memory.asked <= limit


def _key(question: Question) -> str:
    """Return what tells the memory of one question from that of another."""
    source = question.source
    variables = {name: question.environ.get(name) for name in source.variables}
    text = f"{type(source).__module__}.{source!r} {question.checks!r} {variables!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
