"""Are the ranks in step? Comparison of structure, parameters and gradients."""
