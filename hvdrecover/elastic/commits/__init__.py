"""The memory of commits."""
