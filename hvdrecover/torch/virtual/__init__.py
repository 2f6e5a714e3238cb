"""Virtual ranks in torch."""
