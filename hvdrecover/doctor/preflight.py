"""The hosts that a job starts on after they were looked at: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hvdrecover.doctor.findings import Finding
from hvdrecover.errors import LaunchError

_NAME = "--preflight"


@dataclass(frozen=True)
class Selection:
    """The hosts after the preflight.

    Attributes:
        hosts: host to its slots, of those that the job starts on.
        excluded: host to what is wrong with it, of those that are left out.
        warnings: what the job may suffer from.
    """

    hosts: Mapping[str, int]
    excluded: Mapping[str, Finding]
    warnings: tuple[Finding, ...] = ()


def select(hosts: Mapping[str, int], findings: Iterable[Finding], least: int) -> Selection:
    """Leave out the hosts at fault, if enough are left.

    Args:
        hosts: host to its slots.
        findings: what was found of them.
        least: how many slots the job needs.

    Raises:
        LaunchError: too few are left, or what is wrong is not the fault of single hosts.
    """
    findings = list(findings)
    excluded: dict[str, Finding] = {}
    for finding in findings:
        if finding.outcome != "failure":
            continue
        at_fault = [host for host in finding.at_fault if host in hosts]
        if not at_fault:
            raise LaunchError(_NAME, described(finding))
        for host in at_fault:
            excluded.setdefault(host, finding)
    left = {host: slots for host, slots in hosts.items() if host not in excluded}
    if sum(left.values()) < least:
        slots = f"{sum(left.values())} of {sum(hosts.values())} slots are left, and the job needs {least}"
        lines = "".join(f"\n  {host}: {described(finding)}" for host, finding in excluded.items())
        raise LaunchError(_NAME, f"too few hosts are well: {slots}{lines}")
    warnings = tuple(finding for finding in findings if finding.outcome == "warning")
    return Selection(left, excluded, warnings)


def described(finding: Finding) -> str:
    """Return what is wrong, and what to do."""
    return f"{finding.check}: {finding.what}. {finding.remedy}"
