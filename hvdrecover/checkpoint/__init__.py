"""Durable commits: framework-neutral bytes, manifests and storage.

Every function that is given a storage raises `StorageError` if the storage fails.
"""
