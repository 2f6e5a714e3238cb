"""Sample order: which rank gets which sample when, and which samples are done."""
