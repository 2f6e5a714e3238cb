from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from hvdrecover.launch import link
from hvdrecover.launch.link import Link
from tests.unit.launch.children import until

TOKEN = "secret"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def ends(listener: socket.socket) -> Iterator[tuple[Link, Link]]:
    """Two ends of a connection, after the first message."""
    guardian = link.connect("127.0.0.1", port(listener), TOKEN, name="h1")
    assert guardian is not None
    connection, _ = listener.accept()
    supervisor = Link(connection)
    assert supervisor.receive() == [{"token": TOKEN, "name": "h1"}]
    yield guardian, supervisor
    guardian.close()
    supervisor.close()


def port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def received(end: Link) -> list[link.Message]:
    """Wait for what comes, and return it."""
    return until(end.receive, "a message")


def test_a_message_that_comes_in_pieces_is_put_together(listener: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", port(listener))) as sender:
        end = Link(listener.accept()[0])
        text = json.dumps({"detail": "ü" * 50_000}, ensure_ascii=False).encode() + b'\n{"second"'
        found: list[link.Message] = []
        for start in range(0, len(text), 40_001):  # also in the middle of a letter
            sender.sendall(text[start : start + 40_001])
            found += end.receive()
        while not found:
            found += end.receive()
        assert found == [{"detail": "ü" * 50_000}]
        sender.sendall(b": 2}\n")
        assert received(end) == [{"second": 2}]
        assert end.is_open


def test_a_host_that_is_cut_off_is_noticed_by_the_kernel(ends: tuple[Link, Link]) -> None:
    for end in ends:
        connection = end._connection
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count, unanswered = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
        assert idle + interval * count <= 10
        assert unanswered <= 10_000
