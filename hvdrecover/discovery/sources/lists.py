"""Hosts of a list: on the command line, in a file, or printed by a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hvdrecover.discovery import programs
from hvdrecover.discovery.hosts import Host, parse
from hvdrecover.errors import DiscoveryError, HostListError


@dataclass(frozen=True)
class Static:
    """Hosts that don't change; those that fail their checks are left out."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ()

    named: str = field(metadata={"help": "host:slots,host:slots", "metavar": "HOSTS"})

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts that were named."""
        try:
            return parse(self.named.replace(",", "\n"), self.named)
        except HostListError as error:
            before = self.named.split(",")[: error.line - 1]
            column = sum(len(each) + 1 for each in before) + error.column
            raise HostListError(self.named, 1, column, error.problem) from None


@dataclass(frozen=True)
class File:
    """A hostfile: a line host:4, or host slots=4, for each host; it is read again when it changes."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ()

    path: str = field(metadata={"help": "the file"})

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in the file."""
        return parse(read(self.path, self.path), self.path)


@dataclass(frozen=True)
class Command:
    """A program that prints a line host:slots for each host, as for horovodrun."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ("*",)

    command: tuple[str, ...] = field(metadata={"help": "the program and its arguments"})

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts that it prints."""
        return parse(programs.output(self.command, environ, timeout), self.command[0])


def read(path: str, source: str) -> bytes:
    """Return the content of a file.

    Raises:
        DiscoveryError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        where = "" if source == path else f"{path} "
        raise DiscoveryError(source, f"{where}cannot be read: {error.strerror}") from error
