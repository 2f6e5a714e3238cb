"""The harness of acceptance tests for several hosts on one machine; see `tests.support.jobs`."""

from __future__ import annotations

from hvdrecover.drill.lab import needs, network
from hvdrecover.drill.lab.hosts import INTERFACE, Host
from hvdrecover.drill.lab.lab import Lab
from hvdrecover.drill.lab.network import program, traces

__all__ = ["INTERFACE", "Host", "Lab", "needs", "network", "program", "traces"]
