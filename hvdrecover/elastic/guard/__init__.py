"""Whether the ranks are still in step: structure, parameters, gradients, numbers and data."""
