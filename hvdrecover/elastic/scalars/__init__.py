"""Scalars of training: the times of its parts on each rank, and numbers that its script reports."""
