"""Hosts and their slots, and the lists that people write and programs print of them.

A list names one host a line, in any of these forms::

    node1:4              Horovod's form
    node2 slots=4        Open MPI's form; max_slots=8 may follow and is ignored
    node3                no number of slots
    # a comment; also after a host
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.errors import DiscoveryError, HostListError

MOST_SLOTS = 4096  # maximum for one host; a larger number is a typing error
_KILLED = 5.0  # seconds for a killed program to end; one that waits for a disk may never do so
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True)
class Host:
    """A host that a source names.

    Attributes:
        name: as ssh takes it.
        slots: how many processes it takes; None if the source does not say.

    Examples:
        >>> from hvdrecover.discovery import Host
        >>> [Host("node1", slots=4), Host("node2")]
        [Host(name='node1', slots=4), Host(name='node2', slots=None)]
    """

    name: str
    slots: int | None = None


def parse(data: bytes | str, source: str) -> list[Host]:
    """Return the hosts of a list, which may be empty; `source` is its name in errors.

    Raises `HostListError` if a line is not UTF-8, has no valid name or number of slots, or repeats a host.
    """
    hosts: dict[str, Host] = {}
    encoded = data.encode(errors="replace") if isinstance(data, str) else data
    for number, line in enumerate(encoded.splitlines(), start=1):
        try:
            host = _parse_line(line.decode("utf-8-sig").partition("#")[0])
        except UnicodeDecodeError as error:
            raise HostListError(source, number, f"byte 0x{line[error.start]:02x} is not UTF-8") from None
        except ValueError as error:
            raise HostListError(source, number, str(error)) from None
        if host is None:
            continue
        if host.name in hosts:
            raise HostListError(
                source, number, f"'{host.name}' is named twice; name it once, with all its slots"
            )
        hosts[host.name] = host
    return list(hosts.values())


def _parse_line(text: str) -> Host | None:
    """Return the host of a line without its comment; None if the line is empty."""
    name, *options = re.sub(r"\s*=\s*", "=", text).split() or [""]
    if not name:
        return None
    counts = []
    if name.count(":") == 1 and not name.startswith("["):
        name, _, count = name.partition(":")
        counts.append(count)
    for option in options:
        key, equals, value = option.partition("=")
        if key == "slots" and equals:
            counts.append(value)
        elif key not in ("max_slots", "max-slots"):
            raise ValueError(f"unknown word '{option}'; write slots=N after the host")
    if len(counts) > 1:
        raise ValueError(f"'{name}' has two numbers of slots")
    if problem := check(name, *counts):
        raise ValueError(problem)
    return Host(name, int(counts[0]) if counts else None)


def check(name: str, slots: str | int | None = None) -> str:
    """Return the problem with a host and its number of slots, or an empty string."""
    if re.fullmatch(r"\[?[0-9A-Fa-f:.%]*:[A-Za-z0-9:.%\]]*", name):
        return f"'{name}' is an IPv6 address, which Horovod does not support; use the host's name"
    if re.fullmatch(r"[\w.-]+@[\w.-]+", name):
        return f"'{name}' contains a user; name the user in ssh's configuration"
    if not _NAME.fullmatch(name):
        return f"'{name}' is not a valid host name"
    if slots is None or (re.fullmatch("[0-9]{1,18}", str(slots)) and 1 <= int(slots) <= MOST_SLOTS):
        return ""
    return f"'{name}': slots must be an integer from 1 to {MOST_SLOTS}, got '{slots}'"


def add_slots(pairs: Iterable[tuple[str, str]], source: str) -> list[Host]:
    """Return the hosts of pairs of a name and a number of slots; the slots of a repeated host are added.

    Raises `DiscoveryError` for an invalid pair; `source` is the name of the list in the error.
    """
    slots: dict[str, int] = {}
    for name, count in pairs:
        if problem := check(name, count):
            raise DiscoveryError(source, problem)
        slots[name] = slots.get(name, 0) + int(count)
    return [Host(name, count) for name, count in slots.items()]


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> bytes:
    """Return the output of a program. After `timeout` seconds it is killed with all its processes.

    Raises `DiscoveryError` if it cannot be started, fails, or does not end in time.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise DiscoveryError(name, f"cannot be started: {error.strerror}") from error
    try:
        printed, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise DiscoveryError(name, f"has not ended in {timeout:.2g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED)
    if process.returncode:
        # The last line with a letter: many programs end their errors with a rule or a frame.
        lines = [line.strip() for line in errors.decode(errors="replace").splitlines()]
        last = [line for line in lines if any(map(str.isalpha, line))][-1:]
        raise DiscoveryError(name, ": ".join([f"has ended with exit code {process.returncode}", *last]))
    return printed
