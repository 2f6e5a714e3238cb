"""The version of this package, which setup.cfg reads as well."""

__version__ = "0.2.0"
