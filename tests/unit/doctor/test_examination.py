"""The checks, with the answers that hosts would give, and the hosts that they leave out."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.doctor import host
from hvdrecover.doctor.examination import (
    Finding,
    Settings,
    check_horovod,
    check_memory,
    check_network,
    check_root,
    check_shared,
    check_space,
    check_ssh,
    check_versions,
    check_writing,
    select,
)
from hvdrecover.doctor.host import Facts
from hvdrecover.errors import ConfigError, LaunchError

GB = 10**9
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "tensorflow": None, "horovod": "0.28.1+hvdrecover.x"}
ALL = {"gloo": True, "mpi": True, "nccl": False, "cuda": False}
HOST = Facts(VERSIONS, {"torch": ""}, ALL, (), {"lo": "127.0.0.1"}, {}, "", 0, 8 * GB, 1)
BARE = replace(HOST, versions={**VERSIONS, "horovod": None})
UNBUILT = "ImportError: Extension horovod.tensorflow has not been built"


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    same = check_versions({"h1": HOST, "h2": HOST})
    assert (same.outcome, same.what[-14:]) == ("ok", "on all 2 hosts")
    other = replace(HOST, versions={**VERSIONS, "torch": "2.12.1", "tensorflow": "2.21.0"})
    found = check_versions({"h1": HOST, "h2": other, "h3": HOST})
    assert found.what == "torch: 2.13.0 on h1, h3, 2.12.1 on h2; tensorflow: none on h1, h3, 2.21.0 on h2"
    assert (found.outcome, found.at_fault) == ("failure", ["h2"])


def test_most_hosts_decide_which_versions_are_right_and_of_two_the_first() -> None:
    assert check_versions({"h1": BARE, "h2": HOST, "h3": HOST}).at_fault == ["h1"]
    assert check_versions({"h1": HOST, "h2": BARE}).at_fault == ["h2"]


def test_a_framework_must_be_installed() -> None:
    found = check_versions({"h1": replace(HOST, versions={**VERSIONS, "torch": None})})
    assert (found.outcome, found.what) == ("failure", "neither torch nor tensorflow is installed on h1")


@pytest.mark.parametrize(
    ("changes", "outcome", "words", "remedy"),
    [
        ({"versions": BARE.versions}, "failure", "not installed on h1", "install-horovod"),
        ({"horovod": {"torch": "libmpi.so"}, "features": {}}, "failure", "torch: h1: libmpi", "--rebuild"),
        ({"horovod": {"torch": "", "tensorflow": UNBUILT}}, "warning", "for tensorflow", "--rebuild"),
        ({"horovod": {"torch": "", "tensorflow": "segfault"}}, "failure", "for tensorflow", "--rebuild"),
        ({"horovod": {"tensorflow": UNBUILT}, "features": {}}, "failure", "for tensorflow", "--rebuild"),
        ({"features": {**ALL, "gloo": False}}, "warning", "without Gloo", "hvdrecover run --mpi"),
        ({"lacks": ("stall-inspector",)}, "warning", "stall-inspector", "--rebuild"),
        ({"gpus": 2}, "warning", "without NCCL", "HOROVOD_GPU_OPERATIONS"),
    ],
)
def test_an_incomplete_horovod(changes: dict[str, Any], outcome: str, words: str, remedy: str) -> None:
    (found,) = check_horovod({"h1": replace(HOST, **changes)})
    assert found.outcome == outcome
    assert words in found.what and remedy in found.remedy


def test_a_stock_horovod_lacks_our_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    stock = metadata.PathDistribution(tmp_path / "horovod-0.28.1.dist-info")
    monkeypatch.setattr(metadata, "distribution", lambda name: stock)
    lacks = set(host.missing_edits())
    assert {"stall-inspector", "gloo-iface", "registry", "host-order"} <= lacks
    assert not {"c++20", "relative-rpath", "torch-wait"} & lacks


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("ssh: Could not resolve hostname h2: Name or service not known", "DNS"),
        ("root@h2: Permission denied (publickey).", "ssh-copy-id"),
        ("ssh: connect to host h2 port 22: Connection refused", "-p"),
        ("ssh: connect to host h2 port 22: No route to host", "firewall"),
        ("/env/bin/python: No module named hvdrecover", "same path"),
        ("bash: line 1: kaboom", "ssh -o BatchMode=yes HOST true"),
    ],
)
def test_each_failed_login_has_its_remedy(problem: str, remedy: str) -> None:
    well, lost = check_ssh({"h1": "", "h2": problem, "h3": ""}, ["h1"])
    assert (well.outcome, well.what.partition(":")[0]) == ("ok", "h3")
    assert (lost.outcome, lost.what, lost.at_fault) == ("failure", f"h2: {problem}", ["h2"])
    assert remedy in lost.remedy


def network(second: str = "eth0", **problems: dict[str, str]) -> Finding:
    """The finding for three hosts; ``problems`` are host to other host to error."""
    own = {"h1": ("eth0", "10.0.0.1"), "h2": (second, "10.0.0.2"), "h3": ("eth0", "10.0.0.3")}
    reached = {
        name: {other: problems.get(name, {}).get(other, 0.002) for other in own if other != name}
        for name in own
    }
    return check_network(own, reached)


def test_a_host_that_cannot_be_reached_is_named_and_left_out() -> None:
    found = network(h1={"h2": "timed out"}, h3={"h2": "timed out"})
    assert found.what.startswith("h1 (eth0) cannot connect to h2 (10.0.0.2): timed out; h3 ")
    assert (found.outcome, found.at_fault) == ("failure", ["h2"])
    assert network(h2={"h1": "No route to host"}).at_fault == ["h2"]
    lost = dict.fromkeys(("h1", "h2", "h3"), "timed out")
    assert network(h1=lost, h2=lost, h3=lost).at_fault == ["h3", "h2"]


def test_interfaces_must_exist_and_have_one_name() -> None:
    assert network("").what == "no interface of h2 leads to the other hosts"
    other = network("ens3")
    assert (other.outcome, other.at_fault) == ("failure", ["h2"])
    assert "h1 eth0 10.0.0.1, h2 ens3 10.0.0.2" in other.what


@pytest.mark.parametrize(
    ("memory", "state", "outcome", "at_fault"),
    [
        (8 * GB, 2 * GB, "ok", []),
        (8 * GB - 4, 2 * GB, "warning", []),
        (4 * GB - 4, 2 * GB, "failure", ["h2"]),
    ],
)
def test_each_rank_needs_memory_for_two_copies_of_the_state(
    memory: int, state: int | None, outcome: str, at_fault: list[str]
) -> None:
    hosts = {"h1": replace(HOST, memory=100 * GB), "h2": replace(HOST, memory=memory)}
    found = check_memory(hosts, {"h1": 2, "h2": 2}, state)
    assert (found.outcome, [*found.at_fault]) == (outcome, at_fault)
    assert "25 GB on h1" in found.what


def test_ranks_fill_one_host_before_the_next() -> None:
    with pytest.raises(ConfigError, match=r"^-np: 7 .* 6 slots$"):
        Settings({"h1": 2, "h2": 2, "h3": 2}, 7).ranks()
    assert Settings({"h1": 2, "h2": 2, "h3": 2}, 3).ranks() == {"h1": 2, "h2": 1}


# -- storage -----------------------------------------------------------------------------------------

NEWEST = {"commit": "g0001-c00000007", "time": 0.0, "host": "h1", "bytes": 5}


def test_a_storage_that_changes_bytes_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: LocalStorage, path: str, buffer: Any) -> str:
        changed = buffer.copy()
        changed[changed.size // 2] ^= 1
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(changed)
        return "the digest of the right bytes"

    monkeypatch.setattr(LocalStorage, "write", write)
    found = check_writing(host.root(str(tmp_path))["problem"], "h1")
    assert (found.outcome, found.at_fault) == ("failure", ["h1"])
    assert "reads other bytes" in found.what


@pytest.mark.parametrize(
    ("commits", "newest", "outcome"),
    [
        ({"complete": 3, "incomplete": 1}, NEWEST, "ok"),
        ({"complete": 3, "quarantined": 1}, NEWEST, "warning"),
        ({"broken": 2}, None, "failure"),
    ],
)
def test_a_root_should_hold_usable_commits(
    commits: dict[str, int], newest: dict[str, Any] | None, outcome: str
) -> None:
    root = {"url": "s3://b/run", "commits": commits, "newest": newest}
    found = check_root(root, 180.0)
    assert found.outcome == outcome
    assert newest is None or "g0001-c00000007, which is 3 min old" in found.what


@pytest.mark.parametrize(
    ("free", "state", "outcome"), [(None, 1, "skipped"), (39, 10, "warning"), (9, 10, "failure")]
)
def test_a_root_needs_space_for_four_commits(free: int | None, state: int | None, outcome: str) -> None:
    assert check_space(free, state).outcome == outcome


def test_all_hosts_have_to_see_the_same_root() -> None:
    assert check_shared({}, "h1").outcome == "skipped"
    assert check_shared({"h2": True}, "h1").outcome == "ok"
    blind = check_shared({"h2": True, "h3": False}, "h1")
    assert (blind.outcome, blind.what) == ("warning", "h3 cannot see the file that h1 wrote")
    broken = check_shared({"h2": LaunchError("h2", "no credentials"), "h3": False}, "h1")
    assert broken.outcome == "failure"
    assert "h2: no credentials" in broken.what


# -- hosts that are left out -------------------------------------------------------------------------

SLOTS = {"h1": 2, "h2": 2, "h3": 2}
LATE = Finding("clocks", "failure", "h2 +400 s", "Set it.", ["h2"])
LOST = Finding("ssh", "failure", "h3: Connection refused", "Start an ssh server.", ["h3"])


def test_hosts_at_fault_are_left_out_for_their_first_failure() -> None:
    route = Finding("network", "failure", "no route", "Look.", ["h2"])
    findings = [Finding("a", "warning", "b", "C."), LATE, route, LOST]
    assert select(SLOTS, findings, 2) == ({"h1": 2}, {"h2": LATE, "h3": LOST})


def test_too_few_slots_are_an_error_that_names_each_host() -> None:
    with pytest.raises(LaunchError) as caught:
        select(SLOTS, [LATE, LOST], 3)
    first, *hosts = caught.value.problem.split("\n")
    assert re.findall(r"\d+", first) == ["2", "6", "3"]  # slots: left, all, needed
    assert hosts == [f"  h2: {LATE}", f"  h3: {LOST}"]


def test_a_failure_of_all_hosts_is_an_error() -> None:
    everywhere = Finding("horovod", "failure", "it is not installed", "Install it.")
    with pytest.raises(LaunchError) as caught:
        select(SLOTS, [LATE, everywhere], 1)
    assert (caught.value.program, caught.value.problem) == ("--preflight", str(everywhere))
