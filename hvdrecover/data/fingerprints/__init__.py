"""Fingerprints of training data: how each kind is taken and compared; see `hvdrecover.data.fingerprint`."""
