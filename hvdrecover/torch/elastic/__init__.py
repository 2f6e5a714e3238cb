"""``horovod.torch.elastic``, with our state, sampler and loop instead of Horovod's."""

import horovod.torch.elastic as _hvd

from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.state.run import run
from hvdrecover.torch.elastic import sampler as sampler
from hvdrecover.torch.elastic import state as state
from hvdrecover.torch.elastic.sampler import ElasticSampler
from hvdrecover.torch.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

__getattr__, __dir__ = _standing_in(_hvd, globals())
