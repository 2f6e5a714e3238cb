"""Elastic state: what a commit holds, how ranks agree on one, and the loop that goes on after faults."""
