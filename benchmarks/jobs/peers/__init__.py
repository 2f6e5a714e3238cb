"""The same small job as each peer keeps it alive, and what starts those that bring a launcher of their own."""
