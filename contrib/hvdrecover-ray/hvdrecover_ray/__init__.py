"""hvdrecover jobs on a Ray cluster. docs/clusters/ray.md explains how to use this package."""

from hvdrecover_ray.job import Slots, run, slots

__all__ = ["Slots", "run", "slots"]
