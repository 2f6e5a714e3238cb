"""Host discovery: ask a source of hosts, check the hosts, and answer in bounded time."""

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources import source

__all__ = ["Host", "source"]
