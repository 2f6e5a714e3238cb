from __future__ import annotations

from dataclasses import replace

import pytest

from hvdrecover.doctor.network import (
    Reached,
    Reading,
    addresses_of,
    judge_clocks,
    judge_names,
    judge_network,
    judge_ssh,
    offset,
)


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("ssh: Could not resolve hostname h2: Name or service not known", "DNS"),
        ("root@h2: Permission denied (publickey).", "ssh-copy-id"),
        ("ssh: connect to host h2 port 22: Connection refused", "-p"),
        ("ssh: connect to host h2 port 22: No route to host", "firewall"),
        ("no answer in 60 s", "firewall"),
        ("/env/bin/python: No module named hvdrecover", "Install hvdrecover"),
        ("env: '/env/bin/python': No such file or directory", "same path"),
        ("bash: line 1: kaboom", "ssh -o BatchMode=yes HOST true"),
    ],
)
def test_each_reason_why_a_host_can_not_be_logged_in_to_has_its_remedy(problem: str, remedy: str) -> None:
    well, lost = judge_ssh({"h1": "", "h2": problem, "h3": ""}, ["h1"])
    assert (well.outcome, well.facts["hosts"]) == ("ok", ["h3"])
    assert (lost.outcome, lost.what, lost.facts["host"]) == ("failure", f"h2: {problem}", "h2")
    assert remedy in lost.remedy


def test_this_host_takes_no_ssh() -> None:
    (found,) = judge_ssh({"localhost": ""}, ["localhost"])
    assert found.outcome == "skipped"
    (found,) = judge_ssh({"localhost": "no answer in 60 s"}, ["localhost"])
    assert found.outcome == "failure"


def test_names_that_a_host_does_not_know() -> None:
    known = {"h1": "10.0.0.1", "h2": "10.0.0.2"}
    assert judge_names({"h1": known, "h2": known}).outcome == "ok"
    found = judge_names({"h1": known, "h2": {"h1": None, "h2": "127.0.1.1"}})
    assert (found.outcome, found.what) == ("warning", "h2 does not know h1")


def test_a_host_is_known_by_what_others_resolve_its_name_to() -> None:
    resolved = {
        "h1": {"h1": "172.17.0.1", "h2": "10.0.0.2", "localhost": "127.0.0.1"},  # its own, of a bridge
        "h2": {"h1": "10.0.0.1", "h2": "127.0.1.1", "localhost": "127.0.0.1"},
        "localhost": {"h1": None, "h2": "10.0.0.2", "localhost": "127.0.0.1"},
    }
    assert addresses_of(resolved) == {"h1": "10.0.0.1", "h2": "10.0.0.2"}


def reached(**changed: Reached) -> dict[str, Reached]:
    return {
        "h1": Reached("eth0", "10.0.0.1", {"h2": ""}),
        "h2": Reached("eth0", "10.0.0.2", {"h1": ""}),
        **changed,
    }


def test_hosts_that_reach_each_other() -> None:
    found = judge_network(reached())
    assert found.outcome == "ok"
    assert found.facts["hosts"]["h2"] == {"interface": "eth0", "address": "10.0.0.2", "unreached": {}}


def test_a_host_that_is_not_reached_is_named_with_who_tried_and_by_which_interface() -> None:
    found = judge_network(reached(h2=Reached("eth0", "10.0.0.2", {"h1": "No route to host"})))
    assert (found.outcome, found.what) == (
        "failure",
        "h2 (eth0) can't connect to h1 (10.0.0.1): No route to host",
    )


def test_a_host_without_an_interface_that_leads_there() -> None:
    found = judge_network(reached(h2=Reached("", "", {"h1": ""})))
    assert (found.outcome, found.what) == ("failure", "no interface of h2 leads to the other hosts")


def test_hosts_are_left_out_until_all_connect_to_all() -> None:
    lost = "timed out"
    cut_off = {
        "h1": Reached("eth0", "10.0.0.1", {"h2": lost, "h3": ""}),
        "h2": Reached("eth0", "10.0.0.2", {"h1": lost, "h3": lost}),
        "h3": Reached("eth0", "10.0.0.3", {"h1": "", "h2": lost}),
    }
    assert judge_network(cut_off).at_fault == ("h2",)
    assert judge_network(reached(h2=Reached("eth0", "10.0.0.2", {"h1": lost}))).at_fault == ("h2",)
    nobody = {
        host: replace(each, problems=dict.fromkeys(each.problems, lost)) for host, each in cut_off.items()
    }
    assert judge_network(nobody).at_fault == ("h3", "h2")


def test_who_has_no_interface_or_one_of_another_name_than_most_is_left_out() -> None:
    odd = {
        "h1": Reached("ens3", "10.0.0.1", {}),
        "h2": Reached("eth0", "10.0.0.2", {}),
        "h3": Reached("eth0", "10.0.0.3", {}),
    }
    assert judge_network(odd).at_fault == ("h1",)
    assert judge_network({**odd, "h3": Reached("", "", {})}).at_fault == ("h3",)


def test_interfaces_of_different_names_are_of_no_use_to_horovod() -> None:
    found = judge_network(reached(h2=Reached("ens3", "10.0.0.2", {"h1": ""})))
    assert found.outcome == "failure"
    assert "h1 eth0 10.0.0.1, h2 ens3 10.0.0.2" in found.what


def test_the_offset_of_a_clock_is_that_of_the_quickest_answer_and_lies_within_half_its_way() -> None:
    # The clock is 5 s ahead. The first answer is held up for 2 s on its way back, the second comes soon.
    readings = [Reading(100.0, 105.1, 102.2), Reading(103.0, 108.1, 103.2)]
    ahead, off = offset(readings)
    assert ahead == pytest.approx(5.0)
    assert off == pytest.approx(0.1)
    ahead, off = offset(readings[:1])
    assert abs(ahead - 5.0) <= off


@pytest.mark.parametrize(
    ("ahead", "outcome"),
    [(0.0, "ok"), (0.9, "ok"), (1.2, "warning"), (-1.2, "warning"), (299.0, "warning"), (-301.0, "failure")],
)
def test_clocks_may_be_a_second_apart_and_five_minutes_are_a_failure(ahead: float, outcome: str) -> None:
    found = judge_clocks({"h1": (50.0, 0.01), "h2": (50.0 + ahead, 0.01)})
    assert found.outcome == outcome
    assert found.facts["seconds_ahead"] == {"h1": 0.0, "h2": pytest.approx(ahead)}
    assert outcome == "ok" or f"h2 {ahead:+.1f} s" in found.what


def test_clocks_far_from_those_of_most_hosts_are_at_fault_and_of_two_the_second() -> None:
    assert judge_clocks({"h1": (400.0, 0.0), "h2": (0.0, 0.0), "h3": (1.0, 0.0)}).at_fault == ("h1",)
    assert judge_clocks({"h1": (400.0, 0.0), "h2": (0.0, 0.0)}).at_fault == ("h2",)


def test_a_slow_network_is_no_wrong_clock() -> None:
    assert judge_clocks({"h1": (0.0, 0.0), "h2": (2.0, 1.5)}).outcome == "ok"
