"""One training process among others: start, signs of life, waiting, leaving."""
