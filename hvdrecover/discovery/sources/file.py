"""Hosts in a hostfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hvdrecover.discovery.hosts import Host, parse
from hvdrecover.errors import DiscoveryError


@dataclass(frozen=True)
class File:
    """A hostfile: a line host:4, or host slots=4, for each host; it is read again when it changes."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ()

    path: str = field(metadata={"help": "the file"})

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in the file."""
        try:
            return parse(Path(self.path).read_bytes(), self.path)
        except OSError as error:
            raise DiscoveryError(self.path, f"can't be read: {error.strerror}") from error
