"""The harness of acceptance tests for several hosts on one machine; see `tests.support.jobs`."""

from __future__ import annotations

from hvdrecover.drill.lab import INTERFACE, Host, Lab, find, lacks, program, traces

__all__ = ["INTERFACE", "Host", "Lab", "find", "lacks", "program", "traces"]
