"""``hvdrecover run --preflight``: which hosts a job starts on after the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.doctor.findings import Finding
from hvdrecover.errors import LaunchError

_NAME = "--preflight"


@dataclass(frozen=True)
class Selection:
    """The hosts after the checks.

    Attributes:
        hosts: host to its slots, for the hosts on which the job starts.
        excluded: host to the failure for which it is left out.
    """

    hosts: Mapping[str, int]
    excluded: Mapping[str, Finding]


def select(hosts: Mapping[str, int], findings: Sequence[Finding], least: int) -> Selection:
    """Leave out the hosts at fault.

    Args:
        hosts: host to its slots.
        findings: the results of the checks.
        least: how many slots the job needs.

    Raises:
        LaunchError: too few slots are left, or a failure concerns all hosts.
    """
    excluded: dict[str, Finding] = {}
    for finding in findings:
        if finding.outcome != "failure":
            continue
        at_fault = [host for host in finding.at_fault if host in hosts]
        if not at_fault:
            raise LaunchError(_NAME, str(finding))
        for host in at_fault:
            excluded.setdefault(host, finding)
    left = {host: slots for host, slots in hosts.items() if host not in excluded}
    if sum(left.values()) < least:
        slots = f"{sum(left.values())} of {sum(hosts.values())} slots are left, and the job needs {least}"
        lines = "".join(f"\n  {host}: {finding}" for host, finding in excluded.items())
        raise LaunchError(_NAME, f"too few hosts passed the checks: {slots}{lines}")
    return Selection(left, excluded)
