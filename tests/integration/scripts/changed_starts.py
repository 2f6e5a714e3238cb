"""Training whose processes differ in what must not matter; or a rank whose commit fails.

::

    hvdrecover run -np 2 -- python changed_starts.py FOLDER KIND KILLS

- ``sets``: each process builds the optimizer's groups in an order of its own, as from a set of names.
- ``unnamed``: as ``sets``, and Horovod is not told the parameters' names.
- ``compiled``: processes compile the model until the first kill, and later processes do not.
- ``refused``: rank 1's third commit fails, and the rank goes on.

KILLS has a list ``[step, rank, ...]`` for each kill: these ranks end themselves after that step, once. Each
rank writes its weights to ``FOLDER/weights-RANK``, and a line to ``FOLDER/starts`` for each process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import hvdrecover.torch as hvd
from hvdrecover.errors import UnsupportedValueError

FOLDER, KIND, KILLS = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
STEPS, REFUSED = 12, 3

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
before = list(FOLDER.glob("struck-*"))
with (FOLDER / "starts").open("a") as starts:
    starts.write(f"{hvd.rank()}\n")

net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
model: Any = torch.compile(net, backend="eager") if KIND == "compiled" and not before else net
names = ["0.weight", "2.weight", "0.bias", "2.bias"]  # pairs of one shape
if KIND in ("sets", "unnamed") and (hvd.rank() + len(before)) % 2:
    names.reverse()
parameters = dict(net.named_parameters())
groups = [{"params": [parameters[name]]} for name in names]
named = None if KIND == "unnamed" else model.named_parameters()
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9), named)
state = hvd.TorchState(
    model,
    optimizer,
    checkpoint=str(FOLDER / "root"),
    guard=None if KIND == "refused" else hvd.Guard(parameters_every_commits=1),
    step=0,
    note=None,
)


def kill() -> None:
    for step, *ranks in KILLS:
        struck = FOLDER / f"struck-{step}-{hvd.rank()}"
        if state.step == step and hvd.rank() in ranks and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.run
def train(state: hvd.TorchState) -> None:
    while state.step < STEPS:
        samples = torch.linspace(-1, 1, 32).view(4, 8) * (1 + hvd.rank()) + state.step / STEPS
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
        state.step += 1
        kill()
        if KIND == "refused" and (state.step, hvd.rank()) == (REFUSED, 1):
            state.note = object()
            try:
                state.commit()
            except UnsupportedValueError:
                state.note = None
        else:
            state.commit(durable=state.step == STEPS // 2)


train(state)
weights = [each.detach().numpy().tobytes().hex() for each in net.parameters()]
(FOLDER / f"weights-{hvd.rank()}").write_text(json.dumps(weights))
