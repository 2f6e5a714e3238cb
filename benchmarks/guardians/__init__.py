"""Many guardians that train nothing, and one supervisor that holds them."""
