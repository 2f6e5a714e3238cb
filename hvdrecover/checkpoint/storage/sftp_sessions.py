"""SFTP sessions: any number of them over one connection, which is made anew when it was lost.

A session is used by one thread at a time. What goes wrong with one ends it; what looks like a lost connection
ends the connection too, so that the next attempt starts from a new one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paramiko
from paramiko.sftp import CMD_EXTENDED, CMD_READ, CMD_STATUS, CMD_VERSION, int64

_FSYNC = "fsync@openssh.com"
_LIMITS = "limits@openssh.com"
_REQUEST = 1 << 17  # bytes; each request costs processor time, and four times paramiko's size halves that
_AHEAD = 1 << 23  # bytes that are asked for before the first of them has come
_WINDOW = 1 << 24  # bytes the server may send before it has to hear from here
_KEEPALIVE = 30  # seconds


class Session(paramiko.SFTPClient):  # type: ignore[misc]
    """An SFTP session that makes use of OpenSSH's extensions where the server offers them."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._offered: set[str] = set()
        super().__init__(channel)
        self._most = self._largest_request()

    def open_large(self, path: str, mode: str) -> paramiko.SFTPFile:
        """Open a file for large writes."""
        file = self.open(path, mode)
        file.MAX_REQUEST_SIZE = self._most
        return file

    def fill(self, file: paramiko.SFTPFile, into: memoryview, start: int) -> Iterator[memoryview]:
        """Fill memory with a file's bytes from ``start`` on; many requests are sent ahead of their answers.

        Yields:
            The parts of ``into`` that were filled, in order.

        Raises:
            EOFError: the file ends before.
        """
        answers = _Answers()
        asked: deque[tuple[int, int, int]] = deque()
        ahead = done = 0
        while done < len(into):
            while ahead < len(into) and ahead - done < _AHEAD:
                count = min(self._most, len(into) - ahead)
                asked.append((self._ask(answers, file, start + ahead, count), ahead, count))
                ahead += count
            number, done, count = asked.popleft()
            end = done + count
            while done < end:
                data = self._answer(answers, number)
                into[done : done + len(data)] = data
                yield into[done : done + len(data)]
                done += len(data)
                if done < end:  # a server may send less than it was asked for
                    number = self._ask(answers, file, start + done, end - done)

    def _ask(self, answers: _Answers, file: paramiko.SFTPFile, start: int, count: int) -> int:
        return int(self._async_request(answers, CMD_READ, file.handle, int64(start), count))

    def _answer(self, answers: _Answers, number: int) -> bytes:
        while number not in answers.come:
            self._read_response()
        kind, message = answers.come.pop(number)
        if kind == CMD_STATUS:
            self._convert_status(message)
        data: bytes = message.get_string()
        if not data:
            raise EOFError("the file ends before its size")
        return data

    def sync(self, file: paramiko.SFTPFile) -> None:
        """Have the server bring a file to its disk."""
        if _FSYNC in self._offered:
            self._request(CMD_EXTENDED, _FSYNC, file.handle)

    def sync_folder(self, folder: str) -> None:
        """Have the server bring a folder's entries to its disk, if it opens folders, as it does on Linux."""
        try:
            opened = self.open(folder, "r")
        except OSError as error:
            if self.is_lost(error):
                raise
            return
        with opened:
            self.sync(opened)

    def is_lost(self, error: BaseException) -> bool:
        """Return whether an error, of this session, was the connection's rather than the server's answer."""
        lost = isinstance(error, TimeoutError | EOFError | paramiko.SSHException)
        return lost or bool(self.get_channel().closed)

    def _largest_request(self) -> int:
        if _LIMITS not in self._offered:
            return int(paramiko.SFTPFile.MAX_REQUEST_SIZE)
        _, answer = self._request(CMD_EXTENDED, _LIMITS)
        _, *most = (int(answer.get_int64()) for _ in range(3))  # the first is a packet's; 0 says nothing
        return min(_REQUEST, *filter(None, most))

    def _read_packet(self) -> tuple[int, bytes]:
        kind, data = super()._read_packet()
        if kind == CMD_VERSION:  # paramiko passes over the extensions
            answer = paramiko.Message(data)
            answer.get_int()
            while answer.get_remainder():
                self._offered.add(answer.get_text())
                answer.get_string()
        return kind, data


class _Answers:
    """The answers to requests; paramiko hands them over as it does to a file."""

    def __init__(self) -> None:
        self.come: dict[int, tuple[int, paramiko.Message]] = {}

    def _async_response(self, kind: int, message: paramiko.Message, number: int) -> None:
        self.come[number] = (kind, message)


class Sessions:
    """Sessions of one file system of fsspec's, with its host and its credentials.

    Args:
        filesystem: a `KnownHostsFileSystem` with a ``timeout``, which goes for every answer.
    """

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem
        self._idle: list[Session] = []

    @contextmanager
    def session(self) -> Iterator[Session]:
        """A session for the calling thread alone.

        Raises:
            OSError: the server can't be reached.
            paramiko.SSHException: it refused.
        """
        session = self._take()
        try:
            yield session
        except FileNotFoundError:  # no fault of the session
            self._idle.append(session)
            raise
        except BaseException as error:
            if session.is_lost(error):
                session.get_channel().get_transport().close()
            session.close()
            raise
        self._idle.append(session)

    def _take(self) -> Session:
        with self._fs.lock:
            transport = self._fs.client.get_transport()
            if transport is None or not transport.is_active():
                self._idle.clear()
                self._fs.client.close()
                self._fs.connect()
                transport = self._fs.client.get_transport()
            transport.set_keepalive(_KEEPALIVE)
            while self._idle:
                session = self._idle.pop()
                if not session.get_channel().closed:
                    return session
            return self._new(transport)

    def _new(self, transport: paramiko.Transport) -> Session:
        timeout = self._fs.ssh_kwargs["timeout"]
        channel = transport.open_session(window_size=_WINDOW, timeout=timeout)
        try:
            channel.settimeout(timeout)
            channel.invoke_subsystem("sftp")
            return Session(channel)
        except BaseException:
            channel.close()
            raise
