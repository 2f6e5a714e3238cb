"""The changes to Horovod's source that make it build and behave; each has a name and a reason."""

from __future__ import annotations

from hvdrecover.install.edits.edit import Edit, apply, diff, digest
from hvdrecover.install.edits.launcher import LAUNCHER
from hvdrecover.install.edits.lost_peer import LOST_PEER
from hvdrecover.install.edits.native import NATIVE
from hvdrecover.install.edits.rendezvous import RENDEZVOUS
from hvdrecover.install.edits.shutdown import SHUTDOWN
from hvdrecover.install.edits.tensorflow_ops import TENSORFLOW_OPS
from hvdrecover.install.edits.torch_wait import TORCH_WAIT

__all__ = ["EDITS", "Edit", "apply", "diff", "digest"]

EDITS = (*NATIVE, *SHUTDOWN, *LOST_PEER, *TORCH_WAIT, *TENSORFLOW_OPS, *LAUNCHER, *RENDEZVOUS)
