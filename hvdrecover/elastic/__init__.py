"""Elastic state: what a commit holds, how ranks agree on one, and the loop that continues after faults."""
