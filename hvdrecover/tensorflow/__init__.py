"""Recovery for ``horovod.tensorflow``: states whose commits can be durable, for TensorFlow and Keras 3."""

import tensorflow as _tf

from hvdrecover import errors as _errors

if tuple(map(int, _tf.__version__.split(".")[:2])) < (2, 16):  # before the imports that need Keras 3
    raise _errors.ConfigError(
        "tensorflow",
        f"TensorFlow {_tf.__version__} has no Keras 3; install TensorFlow 2.16 or later: "
        "pip install 'tensorflow>=2.16'",
    )

import horovod.tensorflow as _hvd

from hvdrecover.checkpoint import Best, Checkpoint, Keep
from hvdrecover.data.version import DataVersion
from hvdrecover.errors import DataChangedError, NumericsError, OutOfStepError, PerRankError
from hvdrecover.guard import Guard
from hvdrecover.heartbeat import heartbeat
from hvdrecover.scalars import MLflow, Tracker, WandB
from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.state.contents import Loaded
from hvdrecover.state.horovod import join as _join
from hvdrecover.state.horovod import paused
from hvdrecover.state.run import run
from hvdrecover.tensorflow import elastic as elastic
from hvdrecover.tensorflow.averaging import DistributedGradientTape, PartialDistributedGradientTape
from hvdrecover.tensorflow.collectives import (
    BroadcastGlobalVariablesHook,
    allreduce,
    broadcast_,
    broadcast_variables,
    grouped_allreduce,
)
from hvdrecover.tensorflow.dataset import ElasticDataset, PerRank, elastic_dataset
from hvdrecover.tensorflow.fit import fit_callbacks
from hvdrecover.tensorflow.optimizer import DistributedOptimizer
from hvdrecover.tensorflow.state import TensorFlowKerasState, TensorFlowState, load
from hvdrecover.tensorflow.sync_batch_norm import SyncBatchNormalization
from hvdrecover.virtual.ranks import virtual_rank, virtual_size

__all__ = [
    "Best",
    "BroadcastGlobalVariablesHook",
    "Checkpoint",
    "DataChangedError",
    "DataVersion",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ElasticDataset",
    "Guard",
    "Keep",
    "Loaded",
    "MLflow",
    "NumericsError",
    "OutOfStepError",
    "PartialDistributedGradientTape",
    "PerRank",
    "PerRankError",
    "SyncBatchNormalization",
    "TensorFlowKerasState",
    "TensorFlowState",
    "Tracker",
    "WandB",
    "allreduce",
    "broadcast_",
    "broadcast_variables",
    "elastic_dataset",
    "fit_callbacks",
    "grouped_allreduce",
    "heartbeat",
    "load",
    "paused",
    "run",
    "virtual_rank",
    "virtual_size",
]

__getattr__, __dir__ = _standing_in(_hvd, globals())

_join(_hvd)
