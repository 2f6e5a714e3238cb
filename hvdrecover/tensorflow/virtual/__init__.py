"""Virtual ranks in loops of one's own in TensorFlow."""
