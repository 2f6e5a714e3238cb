"""Commits in memory: what they hold, and how it is copied and loaded."""
