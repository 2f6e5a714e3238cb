"""Commit in the middle of an epoch on one process, and end there as if it was killed.

::

    python changed_data.py ROOT DATA POLICY
"""

from __future__ import annotations

import os
import sys

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

root, data, policy = sys.argv[1:]
hvd.init()
model = torch.nn.Linear(1, 1)
sampler = recover.ElasticSampler(list(range(8)), shuffle=False)
guard = recover.Guard(data=recover.DataVersion.of_files(data), data_changed=policy)
state = recover.TorchState(model=model, checkpoint=root, guard=guard, sampler=sampler, epoch=0)


@recover.run
def train(state: recover.TorchState) -> None:
    print("samples", *state.sampler, flush=True)
    state.sampler.record_batch(0, 2)
    state.commit()
    state.flush()
    os._exit(0)


train(state)
