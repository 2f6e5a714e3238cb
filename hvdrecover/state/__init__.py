"""The state of a job: commits in memory, and the agreement of ranks after a fault."""
