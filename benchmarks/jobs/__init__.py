"""Whole jobs: a training under each launcher, to be killed, and one that is guarded by turns."""
