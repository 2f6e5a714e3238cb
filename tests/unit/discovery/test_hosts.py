"""Lists of hosts, as people and programs write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.discovery.hosts import MOST_SLOTS, Host, added_up, check_name, nonsense, parse
from hvdrecover.errors import HostListError

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,30}[a-z0-9])?", fullmatch=True)
HOSTS = st.lists(
    st.builds(Host, NAMES, st.none() | st.integers(1, MOST_SLOTS)), unique_by=lambda host: host.name
)
SPACE = st.text(" \t", max_size=3)
COMMENT = st.just("") | st.from_regex(r"#[^\r\n]*", fullmatch=True)


@st.composite
def written(draw: st.DrawFn, host: Host) -> str:
    """A host in one of the ways in which it can be written."""
    before, between, after = draw(SPACE), draw(SPACE), draw(SPACE)
    if host.slots is None:
        text = host.name
    elif draw(st.booleans()):
        text = f"{host.name}:{host.slots}"
    else:
        text = (
            f"{host.name} slots{between}={between}{host.slots}{draw(st.sampled_from(['', ' max_slots=99']))}"
        )
    return f"{before}{text}{after}{draw(COMMENT)}"


@given(st.data(), HOSTS, st.sampled_from(["\n", "\r\n", "\r"]), st.sampled_from(["", "\ufeff"]))
def test_whatever_way_hosts_are_written_they_are_read(
    data: st.DataObject, hosts: list[Host], end: str, mark: str
) -> None:
    lines = [line for host in hosts for line in ("", data.draw(written(host)), "# none")]
    text = mark + end.join(lines)
    assert parse(text, "hosts") == hosts
    assert parse(text.encode(), "hosts") == hosts


@given(st.binary() | st.text("ab:4 \t\r\n#=slots[].-@\ufeff\x00").map(str.encode))
def test_whatever_is_read_are_hosts_or_an_error_with_its_place(data: bytes) -> None:
    try:
        found = parse(data, "hosts")
    except HostListError as error:
        assert error.line >= 1
        assert error.column >= 1
        assert str(error) == f"hosts: line {error.line}, column {error.column}: {error.problem}"
    else:
        names = [host.name for host in found]
        assert len(set(names)) == len(names)
        assert not any(map(check_name, names))
        assert all(host.slots is None or 1 <= host.slots <= MOST_SLOTS for host in found)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a:0", "line 1, column 3: 0 is not a number of slots; leave a host out that is not to be used"),
        ("a\n  b slots=-1", "line 2, column 11: -1 is not a number of slots; leave a host out that is not"),
        ("a:", "line 1, column 3: '' is not a number of slots"),
        ("a:2.5", "line 1, column 3: '2.5' is not a number of slots"),
        ("a:٣", "line 1, column 3: '٣' is not a number of slots"),
        ("a:99999", "line 1, column 3: 99999 slots are more than any host has"),
        ("a\nb\na:2", "line 3, column 1: 'a' is named before, in line 1; name it once, with all its slots"),
        ("::1", "line 1, column 1: '::1' is an IPv6 address, which Horovod can't take; use the host's name"),
        ("fe80::1:4", "line 1, column 1: 'fe80::1:4' is an IPv6 address"),
        ("[::1]:4", "line 1, column 1: '[::1]:4' is an IPv6 address"),
        ("a:b:4", "line 1, column 1: 'a:b:4' is an IPv6 address"),
        ("a,b", "line 1, column 1: 'a,b' is not a name of a host"),
        ("me@a:2", "line 1, column 1: 'me@a' has a user in it; name the user in ssh's configuration"),
        ("a b", "line 1, column 3: 'b' is not understood; write slots=N after the host"),
        ("a:1 slots=2", "line 1, column 4: the slots of 'a' are said twice"),
        ("a slots=1 slots=2", "line 1, column 11: the slots are said twice"),
        ("a" * 254, "is not a name of a host"),
        (b"a\r\nb\xff", "line 2, column 2: byte 0xff is not UTF-8"),
    ],
)
def test_what_can_not_be_meant(text: str | bytes, error: str) -> None:
    with pytest.raises(HostListError) as caught:
        parse(text, "hosts")
    assert error in str(caught.value)


def test_names_that_are_repeated_once_for_each_slot() -> None:
    assert added_up(["b", "a", "b", "b"]) == [Host("b", 3), Host("a", 1)]


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ([], ""),
        ([Host("a"), Host("b", 2)], ""),
        ([Host("a"), Host("b"), Host("a", 2)], "'a' is named twice"),
        ([Host("a", 0)], "0 is not a number of slots; leave a host out that is not to be used"),
        ([Host("b"), Host("::1")], "'::1' is an IPv6 address, which Horovod can't take; use the host's name"),
    ],
)
def test_what_somebody_elses_source_names_is_checked(hosts: list[Host], problem: str) -> None:
    assert nonsense(hosts) == problem
