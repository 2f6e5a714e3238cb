"""Reports from a run's events: its faults, its recoveries, and their cost.

`summary` draws the conclusions and `history` follows each rank. The other modules show them.
"""
