"""The parts of the topic of what grows: with ranks, guardians, hosts, bytes and tensors."""
