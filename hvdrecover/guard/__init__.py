"""Are the ranks in step? Comparison of structure, parameters, gradients and shares of the data."""
