"""Train a small network in one process for six steps, with a durable commit at each.

``STOP=N`` has the process exit with code 3 after step N. The script prints ``started N``, the step from which
this start continues, and at the end ``weights DIGEST``.
"""

import hashlib
import os

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

STEPS = 6

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
checkpoint = recover.Checkpoint(os.environ["HVDRECOVER_CHECKPOINT"], keep=recover.Keep(last=10))
state = recover.TorchState(model, optimizer, step=0, checkpoint=checkpoint)


@recover.run
def train(state):
    print("started", state.step, flush=True)
    while state.step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit(durable=True)
        if state.step == int(os.environ.get("STOP", "-1")):
            state.flush()
            os._exit(3)


train(state)
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
