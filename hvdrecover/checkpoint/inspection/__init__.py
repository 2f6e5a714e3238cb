"""Looking at a checkpoint root, from outside the job that writes it."""
