"""The near tier: commits in a host's own memory, which outlive the processes that made them."""
