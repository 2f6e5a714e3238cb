"""Of the shape of pytorch_imagenet_resnet50_elastic.py: an ElasticSampler, batches in parts, metrics."""

import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.data
from sklearn.datasets import load_digits

import hvdrecover.torch as hvd

EPOCHS, RATE, PARTS, BATCH, PAUSE = 4, 0.05, 2, 20, float(os.environ["PAUSE"])
GATE = Path(os.environ["FOLDER"], "closed")  # of one batch, as long as it is there


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), 0

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def average(self):
        return (self.sum / self.n).item()


def train(state):
    model.train()
    offset = state.batch
    for idx, (data, target) in enumerate(train_loader):
        state.batch = offset + idx
        if state.batch % 4 == 0:
            state.commit()
        else:
            state.check_host_updates()
        adjust_learning_rate(state.epoch, state.batch)
        optimizer.zero_grad()
        for part in range(0, len(data), BATCH):
            loss = F.cross_entropy(model(data[part : part + BATCH]), target[part : part + BATCH])
            loss.div_(PARTS)
            loss.backward()
        state.train_sampler.record_batch(idx, len(data))
        optimizer.step()
        print("progress", os.getpid(), hvd.rank(), state.epoch, state.batch, flush=True)
        time.sleep(PAUSE)
        while (state.epoch, state.batch) == (3, 10) and GATE.exists():
            time.sleep(PAUSE)
    state.commit()


def validate():
    model.eval()
    right = Metric("val_accuracy")
    with torch.no_grad():
        for data, target in val_loader:
            right.update((model(data).argmax(1) == target).float().mean())
    return right.average


def adjust_learning_rate(epoch, batch):
    progress = min(1.0, epoch + (batch + 1) / len(train_loader)) if epoch < 1 else 1.0
    for group in optimizer.param_groups:
        group["lr"] = RATE * (1 + progress * (hvd.size() - 1))


def end_epoch(state):
    state.epoch += 1
    state.batch = 0
    state.train_sampler.set_epoch(state.epoch)
    state.commit()


@hvd.elastic.run
def full_train(state):
    while state.epoch < EPOCHS:
        train(state)
        state.accuracies.append(validate())
        end_epoch(state)
    return "trained"


hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_set = torch.utils.data.TensorDataset(images[:1440], labels[:1440])
val_set = torch.utils.data.TensorDataset(images[1440:1680], labels[1440:1680])
train_sampler = hvd.elastic.ElasticSampler(train_set)
train_loader = torch.utils.data.DataLoader(train_set, batch_size=BATCH * PARTS, sampler=train_sampler)
val_sampler = hvd.elastic.ElasticSampler(val_set, False, 7)
val_loader = torch.utils.data.DataLoader(val_set, batch_size=60, sampler=val_sampler)
model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 10))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=0.0005),
    named_parameters=model.named_parameters(),
    backward_passes_per_step=PARTS,
    gradient_predivide_factor=2.0,
)
state = hvd.elastic.TorchState(
    model=model,
    optimizer=optimizer,
    train_sampler=train_sampler,
    val_sampler=val_sampler,
    epoch=0,
    batch=0,
    accuracies=[],
)
full_train(state)
if hvd.rank() == 0:
    print("result", state.accuracies[-1], state.epoch, *state.accuracies, flush=True)
