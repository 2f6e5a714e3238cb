"""The costs of hvdrecover, measured beside its peers in the same processes; see ``docs/performance.md``.

``benchmarks/run`` runs all of it. Each module of `benchmarks.topics` measures one topic, in a process of its
own.
"""
