"""Jobs on a Ray cluster: see docs/clusters/ray.md."""

from hvdrecover.ray.job import Slots, run, slots

__all__ = ["Slots", "run", "slots"]
