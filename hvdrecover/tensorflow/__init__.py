"""Recovery for ``horovod.tensorflow``: states whose commits can be durable, for TensorFlow and Keras 3."""

import horovod.tensorflow as _hvd

from hvdrecover.checkpoint.settings import Best, Checkpoint, Keep
from hvdrecover.elastic.joining import join as _join
from hvdrecover.elastic.loading import Loaded
from hvdrecover.elastic.run import run
from hvdrecover.elastic.stalls import paused
from hvdrecover.heartbeat import heartbeat
from hvdrecover.tensorflow.dataset import ElasticDataset, elastic_dataset
from hvdrecover.tensorflow.gradients import DistributedGradientTape
from hvdrecover.tensorflow.keras_callbacks import callbacks
from hvdrecover.tensorflow.loading import load
from hvdrecover.tensorflow.optimizer import DistributedOptimizer
from hvdrecover.tensorflow.state import TensorFlowKerasState, TensorFlowState

__all__ = [
    "Best",
    "Checkpoint",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "ElasticDataset",
    "Keep",
    "Loaded",
    "TensorFlowKerasState",
    "TensorFlowState",
    "callbacks",
    "elastic_dataset",
    "heartbeat",
    "load",
    "paused",
    "run",
]

_join(_hvd)
