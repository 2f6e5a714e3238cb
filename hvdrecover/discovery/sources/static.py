"""Hosts that are named once and for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from hvdrecover.discovery.hosts import Host, parse
from hvdrecover.errors import HostListError


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
