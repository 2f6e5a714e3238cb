"""What training looks like in numbers: how long its parts take on each rank, and what its script tells."""
