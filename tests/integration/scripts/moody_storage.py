"""Makes commits until the file EXIT is there; the storage works, fails or hangs, as the file MOOD says."""

import os
import threading
import time
from pathlib import Path

import fsspec
import horovod.torch as hvd
import torch
from fsspec.implementations.local import LocalFileSystem

import hvdrecover.torch as recover


class MoodyFileSystem(LocalFileSystem):
    """This machine's files; opening one to write fails or never returns."""

    protocol = ("moody",)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("moody://"))

    def _open(self, path, mode="rb", **kwargs):
        mood = Path(os.environ["MOOD"]).read_text() if "w" in mode else "works"
        if mood == "fails":
            raise OSError("the server is on fire")
        if mood == "hangs":
            threading.Event().wait()
        return super()._open(path, mode, **kwargs)


fsspec.register_implementation("moody", MoodyFileSystem)
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)


@recover.run
def train(state):
    while True:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        leave = hvd.allreduce(torch.tensor(float(Path(os.environ["EXIT"]).exists())), name="leave")
        print("step", state.step, "rank", hvd.rank(), "durable", state.last_durable, flush=True)
        if leave:
            return
        time.sleep(0.02)


train(recover.TorchState(model, optimizer, step=0))
