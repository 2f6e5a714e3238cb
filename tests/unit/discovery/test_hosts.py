"""Lists of hosts, as people and programs write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.discovery.lists import parse
from hvdrecover.discovery.sources import MOST_SLOTS, Host, check
from hvdrecover.errors import HostListError
from hvdrecover.redaction import printable


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_hosts_are_read_in_every_form(end: str, mark: str) -> None:
    lines = ["a:4", "", "  b-1.x slots = 2 max_slots=99 # the second", "# none", "c\t", "d slots=4096"]
    text = mark + end.join(lines)
    expected = [Host("a", 4), Host("b-1.x", 2), Host("c"), Host("d", MOST_SLOTS)]
    assert parse(text, "hosts") == parse(text.encode(), "hosts") == expected


@given(st.binary() | st.text("ab:4 \t\r\n#=slots[].-@\ufeff\x00").map(str.encode))
def test_whatever_is_read_are_hosts_or_an_error_with_its_place(data: bytes) -> None:
    try:
        found = parse(data, "hosts")
    except HostListError as error:
        assert error.line >= 1
        assert str(error) == printable(f"hosts: line {error.line}: {error.problem}")
    else:
        names = [host.name for host in found]
        assert len(set(names)) == len(names)
        assert not any(check(host.name, host.slots) for host in found)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("a:0", "line 1: .* got '0'"),
        ("a\n  b slots=-1", "line 2: .* got '-1'"),
        ("a:2.5", "line 1: .*integer .* got '2.5'"),
        ("a:٣", "line 1: .*integer .* got '٣'"),
        ("a:99999", "line 1: .*4096, got '99999'"),
        ("a\nb\na:2", "line 3: 'a' is named twice"),
        ("::1", "line 1: '::1' .*IPv6"),
        ("[::1]:4", r"line 1: '\[::1\]:4' .*IPv6"),
        ("nowhere;touch${IFS}x;:1", r"line 1: '.*' .*not a valid"),
        ("[$(touch)]:1", r"line 1: '\[\$\(touch\)\]:1' .*not a valid"),
        ("me@a:2", "line 1: 'me@a' .*user"),
        ("a b", "line 1: .*'b'.*slots=N"),
        ("a slots=1 slots=2", "line 1: .*'a' .*two"),
        ("a" * 254, f"line 1: '{'a' * 254}' "),
        (b"a\r\nb\xff", "line 2: byte 0xff "),
    ],
)
def test_what_can_not_be_meant(text: str | bytes, fact: str) -> None:
    with pytest.raises(HostListError, match=f"^hosts: {fact}"):
        parse(text, "hosts")
