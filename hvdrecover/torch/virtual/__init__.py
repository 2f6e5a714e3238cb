"""Virtual ranks for torch."""
