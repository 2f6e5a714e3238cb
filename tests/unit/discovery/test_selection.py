"""The hosts that are named to Horovod, and why the others are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdrecover.discovery.selection import (
    FIRST,
    LONGEST,
    Answer,
    Checks,
    Health,
    History,
    Settings,
    answer,
    cooldown_ends_at,
    health_after,
    read_reports,
    report_failure,
)
from hvdrecover.errors import DiscoveryError

NOW = 1000.0
HOSTS = {"a": 4, "b": 2, "c": None}
SEEN = {"a": 900.0, "b": 910.0, "c": 920.0}
HISTORY = History(hosts=HOSTS, listed=999.0, asked=999.0, first_seen=SEEN)


def found(
    history: History = HISTORY,
    settings: Settings | None = None,
    reports: dict[str, list[float]] | None = None,
    *,
    checked: bool = False,
) -> Answer:
    checks = Checks() if checked else Checks(ssh_port=None)
    return answer("src", history, replace(settings or Settings(), checks=checks), reports or {}, NOW)


def named(answer: Answer) -> list[str]:
    return [f"{host.name}:{host.slots}" for host in answer.hosts]


def states(answer: Answer) -> dict[str, str]:
    return {entry.name: entry.state for entry in answer.entries}


def healthy(*names: str) -> dict[str, Health]:
    why = "port 22 (ssh): refused"
    return {name: Health(name in names, 0.0, NOW, why="" if name in names else why) for name in "abc"}


def failing(**passed: float) -> dict[str, Health]:
    """Three hosts that fail, and the times at which some of them passed last."""
    return {name: replace(each, passed=passed.get(name, 0.0)) for name, each in healthy().items()}


def test_all_hosts_the_oldest_first() -> None:
    assert named(found()) == ["a:4", "b:2", "c:1"]
    assert named(found(replace(HISTORY, first_seen={**SEEN, "b": 1.0}))) == ["b:2", "a:4", "c:1"]
    assert named(found(settings=Settings(slots=8))) == ["a:4", "b:2", "c:8"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (Settings(include=("a", "c")), ["a:4", "c:1"]),
        (Settings(include=("[ab]*",), exclude=("b",)), ["a:4"]),
        (Settings(exclude=("a?",)), ["a:4", "b:2", "c:1"]),
    ],
)
def test_limits(settings: Settings, names: list[str]) -> None:
    assert named(found(settings=settings)) == names


def test_hosts_that_are_ill_or_were_not_checked_yet_are_left_out_and_it_is_said_why() -> None:
    health = healthy("c")
    del health["b"]
    answer = found(replace(HISTORY, health=health), checked=True)
    assert states(answer) == {"c": "used", "a": "unhealthy", "b": "unhealthy"}
    assert [entry.why for entry in answer.entries][1:] == ["port 22 (ssh): refused", "it was not checked yet"]


def test_if_none_is_well_those_that_were_last_stand_for_a_while() -> None:
    answer = found(replace(HISTORY, health=failing(a=970.0, b=939.0, c=970.0)), checked=True)
    assert named(answer) == ["a:4", "c:1"]
    assert answer.warning == "src: no host passes its check; using those that passed in the last 60 s"
    for passed in ({"a": NOW - 61}, {"a": NOW + 86400}, {}):
        with pytest.raises(DiscoveryError, match=r"^src: .* 3 hosts .*:\n  a: port 22 \(ssh\): re"):
            found(replace(HISTORY, health=failing(**passed)), checked=True)


def test_a_reported_host_rests_unless_nothing_else_is_left() -> None:
    reports = {"a": [990.0, 995.0], "b": [995.0]}
    answer = found(reports=reports)
    assert states(answer) == {"b": "used", "c": "used", "a": "cooldown"}
    assert answer.entries[-1].why == "reported as failing 2 times; excluded for another 55 s"
    assert named(found(settings=Settings(include=("a",)), reports=reports)) == ["a:4"]


def test_no_host_is_an_answer_only_if_that_is_allowed_and_there_was_none_before() -> None:
    allowed = Settings(allow_empty=True)
    none_yet = found(History(asked=NOW, failure="no host", empty=True), allowed)
    assert (none_yet.entries, none_yet.warning) == ((), "src: no host")
    with pytest.raises(DiscoveryError, match="src: away"):
        found(History(asked=NOW, failure="away"), allowed)
    gone = replace(HISTORY, failure="no host", empty=True)
    assert named(found(gone, allowed)) == ["a:4", "b:2", "c:1"]
    with pytest.raises(DiscoveryError, match=r"^src: no host; .* 61 s "):
        found(replace(gone, listed=NOW - 61), allowed)


def test_two_failed_checks_in_a_row_exclude_a_host_and_three_good_ones_bring_it_back() -> None:
    health, states = None, ""
    for now, passed in enumerate("+-+--++-+++"):
        health = health_after(health, "" if passed == "+" else "refused", float(now))
        states += "+" if health.healthy else "-"
    assert states == "++++------+"
    assert not health_after(None, "refused", 0.0).healthy


def test_reports_are_read_back_also_after_a_writer_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "failing-hosts"
    assert read_reports(path) == read_reports(None) == {}
    report_failure(path, "a", 1.0)
    with path.open("a") as file:
        file.write('{"time": 2, "ho\n7\n')
    report_failure(path, "b", 3.5)
    report_failure(path, "a", 4.0)
    assert read_reports(path) == {"a": [1.0, 4.0], "b": [3.5]}


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(0, 0.0), (1, 0.0), (2, FIRST), (3, 2 * FIRST), (4, 4 * FIRST), (12, LONGEST), (2000, LONGEST)],
)
def test_rest_grows_up_to_a_limit(count: int, seconds: float) -> None:
    until = cooldown_ends_at([1000.0] * count, 1000.0)
    assert until == (1000.0 + seconds if seconds else 0.0)
