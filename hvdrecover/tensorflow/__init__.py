"""Recovery for ``horovod.tensorflow``: states whose commits can be durable, for TensorFlow and Keras 3."""

from hvdrecover import config as _config
from hvdrecover.checkpoint.settings import Best, Checkpoint, Keep
from hvdrecover.elastic.loading import Loaded
from hvdrecover.elastic.run import run
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
    "load",
    "run",
]

_config.choose_controller(_config.read())
