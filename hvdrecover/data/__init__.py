"""Sample order: which rank sees which sample when, and what has been seen."""
