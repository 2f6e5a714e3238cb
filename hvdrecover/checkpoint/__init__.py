"""Durable commits: framework-neutral bytes, manifests and storage."""
