"""A script for plain Horovod: without a state of hvdrecover's, but with its own checkpoints.

Argument: a folder for checkpoints and gates. At a gate, each rank prints a line and awaits a file.
With ERROR=start it fails at once; with ERROR=gate, rank 1 fails at the second gate.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

folder = Path(sys.argv[1])
checkpoint, error = folder / "checkpoint.pt", os.environ.get("ERROR")
hvd.init()


def leave(number, frame):
    (folder / f"terminated-{hvd.rank()}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
if error == "start":
    raise ValueError("wrong from the start")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
begin = 0
if hvd.rank() == 0 and checkpoint.exists():
    saved = torch.load(checkpoint)
    begin = saved["epoch"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
begin = int(hvd.broadcast(torch.tensor(begin), root_rank=0, name="epoch"))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
print(f"begins {hvd.rank()} {hvd.size()} {begin}", flush=True)
for epoch in range(begin, 4):
    torch.manual_seed(10 * epoch + hvd.rank())
    for step in range(6):
        inputs = torch.randn(16, 8)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if step == 3:
            print(
                f"gate {epoch} {os.getpid()} {hvd.rank()}", flush=True
            )  # mpirun forwards each part by itself
            while not (folder / str(epoch)).exists():
                time.sleep(0.02)
            if (error, epoch, hvd.rank()) == ("gate", 1, 1):
                raise ValueError("wrong at the gate")
    if hvd.rank() == 0:
        saved = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / "new.pt")
        (folder / "new.pt").replace(checkpoint)
if hvd.rank() == 0:
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()}", flush=True)
