"""Hosts that a program prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from hvdrecover.discovery import programs
from hvdrecover.discovery.hosts import Host, parse


@dataclass(frozen=True)
class Command:
    """A program that prints a line host:slots for each host, as for horovodrun."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ("*",)

    command: tuple[str, ...] = field(metadata={"help": "the program and its arguments"})

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts that it prints."""
        return parse(programs.output(self.command, environ, timeout), self.command[0])
