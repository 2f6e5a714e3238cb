"""Host discovery: a host source is asked, its answer checked, and given in time whatever happens."""

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources.interface import Source

__all__ = ["Host", "Source"]
