"""Durable commits: when they are made, and waiting for them."""
