"""A script whose ranks have loaders, losses and random streams of their own; each may kill itself once."""

import hashlib
import json
import os
import signal
from pathlib import Path

import horovod.torch as hvd
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import hvdrecover.torch as recover
from hvdrecover.examples.digits import digits

FOLDER = Path(os.environ["FOLDER"])  # of the reports, and of who has been killed
KILLED = json.loads(os.environ.get("KILLED", "{}"))  # step to rank

torch.set_num_threads(1)
hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 10)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
)
torch.manual_seed(100 + hvd.rank())  # streams of the script's own
samples, _ = digits()
images, labels = torch.from_numpy(samples.images[:320]), torch.from_numpy(samples.labels[:320])
mine = torch.arange(320)[hvd.rank() :: hvd.size()]
loader = StatefulDataLoader(mine, batch_size=16, shuffle=True, num_workers=1)
state = recover.TorchState(
    model, optimizer, rng="store", loader=recover.PerRank(loader), losses=recover.PerRank([]), epoch=0, step=0
)


def fall(step):
    """Die, if it is this rank's turn and it has not done so before."""
    mark = FOLDER / f"killed-{step}"
    if KILLED.get(str(step)) == hvd.rank() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@recover.run
def train(state):
    while state.epoch < 2:
        for batch in state.loader:
            fall(state.step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            state.losses.value.append([batch.tolist(), loss.item()])
            state.step += 1
            if state.step % 5 == 0:  # step 10 is the last one of an epoch
                state.commit()
        state.epoch += 1


train(state)
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
report = {"weights": hashlib.sha256(weights).hexdigest(), "step": state.step, "losses": state.losses.value}
(FOLDER / f"report-{hvd.rank()}").write_text(json.dumps(report))
