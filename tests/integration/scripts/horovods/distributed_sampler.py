"""Of the shape of pytorch_mnist_elastic.py: a DistributedSampler, and batches counted by the state."""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.data.distributed
from sklearn.datasets import load_digits

import hvdrecover.torch as hvd

EPOCHS, RATE, PAUSE = 4, 0.05, float(os.environ["PAUSE"])
GATE = Path(os.environ["FOLDER"], "closed")  # of one batch, as long as it is there

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_set = torch.utils.data.TensorDataset(images[:1440], labels[:1440])
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_set, num_replicas=hvd.size(), rank=hvd.rank()
)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=36, sampler=train_sampler)

model = torch.nn.Sequential(
    torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(48, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    op=getattr(hvd, os.environ.get("OP", "Average")),
)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


@hvd.elastic.run
def train(state):
    # Not before the training function, as Horovod's documentation says: new workers would wait there.
    hvd.broadcast_parameters(state.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(state.optimizer, root_rank=0)
    for state.epoch in range(state.epoch, EPOCHS + 1):
        state.model.train()
        train_sampler.set_epoch(state.epoch)
        steps_remaining = len(train_loader) - state.batch
        for state.batch, (data, target) in enumerate(train_loader):
            if state.batch >= steps_remaining:
                break
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(data), target)
            loss.backward()
            state.optimizer.step()
            hvd.allreduce(loss.detach())  # without a name
            state.finished[state.epoch] = state.batch
            print("progress", os.getpid(), hvd.rank(), state.epoch, state.batch, flush=True)
            time.sleep(PAUSE)
            while (state.epoch, state.batch) == (3, 10) and GATE.exists():
                time.sleep(PAUSE)
            state.commit()
        state.batch = 0


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = RATE * hvd.size()
    print("reset", hvd.size(), flush=True)


state = hvd.elastic.TorchState(model, optimizer, epoch=1, batch=0, finished={}, rng=torch.get_rng_state())
state.register_reset_callbacks([on_state_reset])
train(state)

model.eval()
with torch.no_grad():
    right = (model(images[1440:]).argmax(1) == labels[1440:]).float().mean().item()
accuracy = metric_average(right, "accuracy")
if hvd.rank() == 0:
    print(
        "result", accuracy, state.epoch, sorted(state.finished), optimizer.param_groups[0]["lr"], flush=True
    )
