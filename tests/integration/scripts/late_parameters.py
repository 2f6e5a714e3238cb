"""Training that a kill must not change: a scheduler made before the wrapper, a layer that is unfrozen later.

Each process builds the optimizer's list in an order of its own. Each rank has other samples. The step is
called with a closure. At each step of KILLS rank 1 kills itself, once. Rank 0 writes REPORT at the end, and
rank 1 adds its weights.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch

import hvdrecover.torch as hvd

REPORT, KILLS = Path(os.environ["REPORT"]), json.loads(os.environ["KILLS"])
STEPS, UNFREEZE, COMMIT_EVERY = 12, 4, 3

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model[0].requires_grad_(False)
head = list(model[2].parameters())
if os.getpid() % 2 == hvd.rank():
    head.reverse()
plain = torch.optim.SGD(head, lr=0.1, momentum=0.9, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model[2].named_parameters())
state = hvd.TorchState(model, optimizer, scheduler=scheduler, step=0)


def closure() -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    samples = torch.linspace(-1, 1, 32).view(4, 8) * (1 + hvd.rank()) + state.step
    loss = model(samples).square().mean()
    loss.backward()
    return loss


@hvd.run
def train(state: hvd.TorchState) -> None:
    while state.step < STEPS:
        if state.step >= UNFREEZE and len(optimizer.param_groups) == 1:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        optimizer.step(closure)
        scheduler.step()
        state.step += 1
        struck = REPORT.with_name(f"{REPORT.name}.{state.step}")
        if hvd.rank() == 1 and state.step in KILLS and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step % COMMIT_EVERY == 0:
            state.commit()


train(state)
weights = [each.detach().numpy().tobytes().hex() for each in model.parameters()]
found = [weights, [group["lr"] for group in optimizer.param_groups]]
REPORT.with_name(f"{REPORT.name}-{hvd.rank()}").write_text(json.dumps(found))
