"""Recovery for ``horovod.torch``: a drop-in for ``horovod.torch.elastic`` whose commits can be durable."""

from hvdrecover import config as _config
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.run import run
from hvdrecover.torch.sampler import ElasticSampler
from hvdrecover.torch.state import TorchState

__all__ = ["Checkpoint", "ElasticSampler", "TorchState", "run"]

_config.choose_controller(_config.read())
