"""The hosts that a job starts on after they were looked at."""

from __future__ import annotations

import re

import pytest

from hvdrecover.doctor.findings import failure, ok, skipped, warning
from hvdrecover.doctor.preflight import described, select
from hvdrecover.errors import LaunchError

HOSTS = {"h1": 2, "h2": 2, "h3": 2}
WRONG = failure("compute", "computed wrongly: h2: CPU 1", "Leave it out.", at_fault=["h2"])
LOST = failure("ssh", "h3: Connection refused", "Start an ssh server.", at_fault=["h3"])
SLOW = warning("compute", "slow: h1", "Look at its clocks.")


def test_all_are_well() -> None:
    found = select(HOSTS, [ok("ssh", "logged in"), skipped("gpus", "none"), SLOW], 6)
    assert (found.hosts, found.excluded, found.warnings) == (HOSTS, {}, (SLOW,))


def test_hosts_at_fault_are_left_out_each_for_the_first_thing_that_is_wrong() -> None:
    late = failure("clocks", "h2 +400 s", "Set it.", at_fault=["h2"])
    found = select(HOSTS, [WRONG, late, LOST], 2)
    assert found.hosts == {"h1": 2}
    assert found.excluded == {"h2": WRONG, "h3": LOST}


def test_too_few_are_left() -> None:
    with pytest.raises(LaunchError) as caught:
        select(HOSTS, [WRONG, LOST], 3)
    first, *hosts = caught.value.problem.split("\n")
    assert caught.value.program == "--preflight"
    assert re.findall(r"\d+", first) == ["2", "6", "3"]  # slots: left, of all, needed
    assert hosts == [f"  h2: {described(WRONG)}", f"  h3: {described(LOST)}"]


@pytest.mark.parametrize("at_fault", [[], ["products on cpus"]])
def test_what_is_not_the_fault_of_single_hosts_stops_the_job(at_fault: list[str]) -> None:
    everywhere = failure("horovod", "it is not installed", "Install it.", at_fault=at_fault)
    with pytest.raises(LaunchError) as caught:
        select(HOSTS, [WRONG, everywhere], 1)
    assert (caught.value.program, caught.value.problem) == ("--preflight", described(everywhere))
