"""Comparison of the ranks: structure, parameters, gradients, numbers and data."""
