"""Runnable examples, part of the package so that an installed copy has them too."""
