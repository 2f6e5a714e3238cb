"""Reports from a run's events: its faults, its recoveries, and what they have cost.

The way of the events: `reading` takes files apart, `clocks` sets the hosts' clocks against each other,
`rendezvous` finds out which ranks were together, and `summary` draws the conclusions. All but `reading` are
pure functions.
"""
