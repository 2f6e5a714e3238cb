"""Recovery for ``horovod.torch``: a drop-in for ``horovod.torch.elastic`` whose commits can be durable."""

import horovod.torch as _hvd

from hvdrecover.checkpoint import Best, Checkpoint, Keep
from hvdrecover.data.version import DataVersion
from hvdrecover.errors import DataChangedError, NumericsError, OutOfStepError, PerRankError, StepError
from hvdrecover.guard import Guard
from hvdrecover.heartbeat import heartbeat
from hvdrecover.scalars import MLflow, Tracker, WandB
from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.state.contents import Loaded
from hvdrecover.state.horovod import join as _join
from hvdrecover.state.horovod import paused
from hvdrecover.state.rank_local import PerRank
from hvdrecover.state.run import run
from hvdrecover.torch import elastic as elastic
from hvdrecover.torch import stepping as _stepping
from hvdrecover.torch.elastic.sampler import ElasticSampler
from hvdrecover.torch.state import TorchState, load
from hvdrecover.virtual.ranks import virtual_rank, virtual_size

__all__ = [
    "Best",
    "Checkpoint",
    "DataChangedError",
    "DataVersion",
    "ElasticSampler",
    "Guard",
    "Keep",
    "Loaded",
    "MLflow",
    "NumericsError",
    "OutOfStepError",
    "PerRank",
    "PerRankError",
    "StepError",
    "TorchState",
    "Tracker",
    "WandB",
    "heartbeat",
    "load",
    "paused",
    "run",
    "virtual_rank",
    "virtual_size",
]

__getattr__, __dir__ = _standing_in(_hvd, globals())

_join(_hvd)
_stepping.extend()
