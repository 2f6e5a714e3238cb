"""The findings of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdrecover.errors import HvdrecoverError, LaunchError

Outcome = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The finding of one check.

    Attributes:
        check: what was looked at, in a word or two.
        outcome: ``failure`` if a job can't do its work like this; ``warning`` if it can, and may suffer;
            ``skipped`` if it could not be looked at.
        what: what was found, or why it was skipped.
        remedy: what to do; empty unless it is a warning or a failure.
        facts: the same for programs.
        at_fault: the hosts without which a job would be well; empty where it isn't the fault of single hosts.
    """

    check: str
    outcome: Outcome
    what: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    at_fault: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.remedy) != (self.outcome in ("warning", "failure")):
            raise ValueError(f"{self.check}: warnings and failures have a remedy, and nothing else has one")


def ok(check: str, what: str, **facts: Any) -> Finding:
    """Nothing is wrong."""
    return Finding(check, "ok", what, facts=facts)


def skipped(check: str, why: str, **facts: Any) -> Finding:
    """It could not be looked at."""
    return Finding(check, "skipped", why, facts=facts)


def warning(check: str, what: str, remedy: str, **facts: Any) -> Finding:
    """A job can work like this, and may suffer."""
    return Finding(check, "warning", what, remedy, facts)


def failure(check: str, what: str, remedy: str, *, at_fault: Iterable[str] = (), **facts: Any) -> Finding:
    """A job can't do its work like this."""
    return Finding(check, "failure", what, remedy, facts, tuple(at_fault))


def refused(check: str, error: LaunchError, otherwise: str, **facts: Any) -> Finding:
    """Return what a host says that it can't do; by our rule, a message's last sentence says what to do.

    Args:
        check: what was looked at.
        error: what came instead of an answer.
        otherwise: what to do, if the message does not say it.
        facts: the same for programs.
    """
    what, _, remedy = error.problem.rpartition(". ")
    if not what or not remedy[:1].isupper():
        what, remedy = error.problem, otherwise
    return failure(check, f"{error.program}: {what}", remedy, at_fault=[error.program], **facts)


def checked(check: str, look: Callable[[], Finding | Iterable[Finding]]) -> list[Finding]:
    """Return what a check finds; that it has failed itself, if it has."""
    found: list[Finding] = []
    try:
        told = look()
        for each in [told] if isinstance(told, Finding) else told:
            found.append(each)
    except LaunchError as error:
        found.append(refused(check, error, "Look after this host, and run `hvdrecover doctor` again."))
    except HvdrecoverError as error:
        remedy = "Do what the message says, and run `hvdrecover doctor` again."
        found.append(failure(check, str(error), remedy))
    except Exception as error:
        what = f"the check itself has failed: {type(error).__name__}: {error}"
        found.append(failure(check, what, "This is a bug of hvdrecover; report it with this line."))
    return found


def has_failed(findings: Iterable[Finding]) -> bool:
    """Return whether anything is wrong that a job can't work with."""
    return any(finding.outcome == "failure" for finding in findings)
