"""Host discovery: ask a source of hosts, check the hosts, and answer in bounded time."""

from hvdrecover.discovery.sources import Host, source

__all__ = ["Host", "source"]
