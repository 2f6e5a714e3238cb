"""The parts of the topic of what grows: with ranks, guardians, hosts, bytes and tensors."""

PAGE = "scale"  # of the documentation, to which its facts belong
