"""Whole jobs: the same training under each launcher, killed and timed by `benchmarks.topics.recovery`."""
