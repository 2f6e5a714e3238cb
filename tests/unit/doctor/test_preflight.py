"""Which hosts a job starts on after the checks."""

from __future__ import annotations

import re

import pytest

from hvdrecover.doctor.checks import Finding, select
from hvdrecover.errors import LaunchError

HOSTS = {"h1": 2, "h2": 2, "h3": 2}
LATE = Finding("clocks", "failure", "h2 +400 s", "Set it.", ["h2"])
LOST = Finding("ssh", "failure", "h3: Connection refused", "Start an ssh server.", ["h3"])


def test_hosts_at_fault_are_left_out_for_their_first_failure() -> None:
    route = Finding("network", "failure", "no route", "Look.", ["h2"])
    findings = [Finding("a", "warning", "b", "C."), LATE, route, LOST]
    assert select(HOSTS, findings, 2) == ({"h1": 2}, {"h2": LATE, "h3": LOST})


def test_too_few_slots_are_an_error_that_names_each_host() -> None:
    with pytest.raises(LaunchError) as caught:
        select(HOSTS, [LATE, LOST], 3)
    first, *hosts = caught.value.problem.split("\n")
    assert re.findall(r"\d+", first) == ["2", "6", "3"]  # slots: left, all, needed
    assert hosts == [f"  h2: {LATE}", f"  h3: {LOST}"]


def test_a_failure_of_all_hosts_is_an_error() -> None:
    everywhere = Finding("horovod", "failure", "it is not installed", "Install it.")
    with pytest.raises(LaunchError) as caught:
        select(HOSTS, [LATE, everywhere], 1)
    assert (caught.value.program, caught.value.problem) == ("--preflight", str(everywhere))
