"""Reports from the record of a run; `summary` draws the conclusions, and the other modules show them."""
