"""The result of one check: an outcome, a sentence, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdrecover.errors import LaunchError

Outcome = Literal["ok", "warning", "failure", "skipped"]
RUN_AGAIN = "Repair this host, then run `hvdrecover doctor` again."


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        outcome: ``failure`` if a job cannot run like this; ``warning`` if it can, with a disadvantage;
            ``skipped`` if the check was not possible.
        what: the observation, or the reason for skipping.
        remedy: what to do; empty unless the outcome is a warning or a failure.
        at_fault: hosts without which the failure would be gone; empty if the failure concerns all hosts.
    """

    check: str
    outcome: Outcome
    what: str
    remedy: str = ""
    at_fault: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.check}: {self.what}. {self.remedy}".rstrip()


def ok(check: str, what: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, "ok", what)


def skipped(check: str, why: str) -> Finding:
    """Return the finding of a check that was not possible."""
    return Finding(check, "skipped", why)


def warning(check: str, what: str, remedy: str) -> Finding:
    """Return a problem that a job can live with."""
    return Finding(check, "warning", what, remedy)


def failure(check: str, what: str, remedy: str, at_fault: Iterable[str] = ()) -> Finding:
    """Return a problem with which a job cannot run."""
    return Finding(check, "failure", what, remedy, tuple(at_fault))


def host_failure(check: str, error: LaunchError, remedy: str = RUN_AGAIN) -> Finding:
    """Return a host's error as a finding.

    Our error messages end with a sentence that says what to do. It replaces ``remedy`` if it is there.
    """
    what, _, last = error.problem.rpartition(". ")
    if not what or not last[:1].isupper():
        what, last = error.problem, remedy
    return failure(check, f"{error.program}: {what}", last, [error.program])


@dataclass(frozen=True)
class Selection:
    """The hosts of a job with ``--preflight`` after the checks.

    Attributes:
        hosts: host to its slots, for the hosts on which the job starts.
        excluded: host to the failure for which it is left out.
    """

    hosts: Mapping[str, int]
    excluded: Mapping[str, Finding]


def select(hosts: Mapping[str, int], findings: Sequence[Finding], least: int) -> Selection:
    """Leave out the hosts at fault of a job that needs at least so many slots.

    Raises:
        LaunchError: too few slots are left, or a failure concerns all hosts.
    """
    excluded: dict[str, Finding] = {}
    for finding in (each for each in findings if each.outcome == "failure"):
        at_fault = [host for host in finding.at_fault if host in hosts]
        if not at_fault:
            raise LaunchError("--preflight", str(finding))
        for host in at_fault:
            excluded.setdefault(host, finding)
    left = {host: slots for host, slots in hosts.items() if host not in excluded}
    if sum(left.values()) < least:
        slots = f"{sum(left.values())} of {sum(hosts.values())} slots are left, and the job needs {least}"
        lines = "".join(f"\n  {host}: {finding}" for host, finding in excluded.items())
        raise LaunchError("--preflight", f"too few hosts passed the checks: {slots}{lines}")
    return Selection(left, excluded)
