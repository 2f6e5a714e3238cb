"""Recovery for ``horovod.torch``: a drop-in for ``horovod.torch.elastic`` whose commits can be durable."""

import horovod.torch as _hvd

from hvdrecover.checkpoint.settings import Best, Checkpoint, Keep
from hvdrecover.elastic.joining import join as _join
from hvdrecover.elastic.loading import Loaded
from hvdrecover.elastic.run import run
from hvdrecover.elastic.stalls import paused
from hvdrecover.heartbeat import heartbeat
from hvdrecover.torch import progress as _progress
from hvdrecover.torch.loading import load
from hvdrecover.torch.sampler import ElasticSampler
from hvdrecover.torch.state import TorchState

__all__ = [
    "Best",
    "Checkpoint",
    "ElasticSampler",
    "Keep",
    "Loaded",
    "TorchState",
    "heartbeat",
    "load",
    "paused",
    "run",
]

_join(_hvd)
_progress.watch()
