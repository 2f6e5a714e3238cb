"""Hosts that are named once and for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from hvdrecover.discovery.hosts import Host, parse


@dataclass(frozen=True)
class Static:
    """Hosts that don't change; those that fail their checks are left out."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ()

    named: str = field(metadata={"help": "host:slots,host:slots", "metavar": "HOSTS"})

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts that were named."""
        return parse(self.named.replace(",", "\n"), self.named)
