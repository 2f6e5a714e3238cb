"""Train a small network, with a commit at each step.

Variables: ``ROOT`` if HVDRECOVER_CHECKPOINT is not the root; ``STEPS``, 6 by default; ``SECONDS`` for each
step; ``EVERY``, commits for each durable one, by default all are. With ``STOP=N`` the process exits with code
3 after step N. Like a script of Hydra's, it first changes to a folder that is new at each start, below
``OUTPUTS`` if that is set. The script prints ``started N``, the step from which this start continues, and at
the end ``weights DIGEST``.
"""

import hashlib
import os
import tempfile
import time

if "OUTPUTS" in os.environ:
    os.chdir(tempfile.mkdtemp(dir=os.environ["OUTPUTS"]))

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover

STEPS, STOP = int(os.environ.get("STEPS", "6")), int(os.environ.get("STOP", "-1"))
EVERY = int(os.environ.get("EVERY", "0"))

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
root = os.environ.get("ROOT") or os.environ["HVDRECOVER_CHECKPOINT"]
checkpoint = recover.Checkpoint(root, every_commits=EVERY or 1, keep=recover.Keep(last=10))
state = recover.TorchState(model, optimizer, step=0, checkpoint=checkpoint)


@recover.run
def train(state):
    print("started", state.step, flush=True)
    while state.step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit(durable=not EVERY)
        if state.step == STOP:
            state.flush()
            os._exit(3)
        time.sleep(float(os.environ.get("SECONDS", "0")))


train(state)
if hvd.rank() == 0:
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
