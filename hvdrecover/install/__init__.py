"""Building and installing a Horovod that works with current PyTorch and TensorFlow."""
