"""Recovery for ``horovod.torch``: a drop-in for ``horovod.torch.elastic`` whose commits can be durable."""

from hvdrecover import config as _config
from hvdrecover.checkpoint.settings import Best, Checkpoint, Keep
from hvdrecover.elastic.loading import Loaded
from hvdrecover.elastic.run import run
from hvdrecover.torch.loading import load
from hvdrecover.torch.sampler import ElasticSampler
from hvdrecover.torch.state import TorchState

__all__ = ["Best", "Checkpoint", "ElasticSampler", "Keep", "Loaded", "TorchState", "load", "run"]

_config.choose_controller(_config.read())
