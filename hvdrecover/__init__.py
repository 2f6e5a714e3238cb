"""Recovery for Horovod: durable commits, exactly-once data, and jobs that are hard to kill.

Importing this package imports neither a framework nor Horovod. Training scripts import the adapter of
their framework: ``import hvdrecover.torch as recover``.
"""

from hvdrecover.checkpoint import Best, Checkpoint, Keep
from hvdrecover.version import __version__

__all__ = ["Best", "Checkpoint", "Keep", "__version__"]
