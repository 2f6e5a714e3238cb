"""Virtual ranks that any processes carry out; who is killed, slowed down or joins is in the JSON of PLAN.

``{"kill": {STEP: RANKS}, "hosts": {STEP: [SIZE, HOSTS]}, "slow": {STEP: RANK}}``: in a step, each once, the
processes of these ranks are killed; at the end of a step the file HOSTS is changed, and all wait until there
are so many processes; from a step on, this rank is slow.
"""

import json
import os
import signal
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.examples.digits import digits, options
from hvdrecover.examples.torch_digits import optimizer_for

SAMPLES = 330  # 5 batches of 16 for each of 4 virtual ranks, and a short one with padding

chosen = options("torch", __doc__, None)
plan = json.loads(os.environ.get("PLAN", "{}"))
marks = chosen.ledger / "killed"
marks.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(1)
torch.manual_seed(1)
hvd.init()


class Noisy(TensorDataset):
    """Digits with noise, so that samples depend on random streams."""

    def __getitem__(self, index):
        image, label, number = super().__getitem__(index)
        return image + 0.1 * torch.randn(64), label, number


samples, _ = digits()
dataset = Noisy(*(torch.from_numpy(each[:SAMPLES]) for each in samples))
model = torch.nn.Sequential(
    torch.nn.Linear(64, 32),
    torch.nn.BatchNorm1d(32),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(32, 10),
)
optimizer = hvd.DistributedOptimizer(
    optimizer_for(chosen.optimizer, model.parameters()), named_parameters=model.named_parameters()
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
sampler = recover.ElasticSampler(dataset, shuffle=True, seed=0)
loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=chosen.loader_workers)
state = recover.TorchState(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    sampler=sampler,
    losses=recover.PerRank([]),
    epoch=0,
    step=0,
    checkpoint=chosen.checkpoint,
    virtual_ranks=chosen.virtual_ranks,
    shares=os.environ.get("SHARES"),
)


def may_be_killed():
    """Die in the middle of a step, at once with the others whose turn it is."""
    victims = plan.get("kill", {}).get(str(state.step), [])
    mine = [marks / f"{state.step}-{rank}" for rank in victims]
    if hvd.rank() in victims and not mine[victims.index(hvd.rank())].exists():
        mine[victims.index(hvd.rank())].touch()
        while not all(mark.exists() for mark in mine):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def may_change_hosts():
    """Wait until there are as many processes as there are to be from here on."""
    size, hosts = plan.get("hosts", {}).get(str(state.step), [hvd.size(), ""])
    if hvd.size() != size and hvd.rank() == 0:
        Path(os.environ["HOSTS"]).write_text(hosts)
    while hvd.size() != size:
        state.commit()
        time.sleep(0.02)


def may_be_slow():
    """Take long for a part, if it is this process that does."""
    slow = {int(step): rank for step, rank in plan.get("slow", {}).items() if int(step) <= state.step}
    if slow and slow[max(slow)] == hvd.rank():
        time.sleep(0.1)


def look():
    """Call the model in training mode between steps, at a commit: batch norm changes its buffers."""
    if state.step % chosen.commit_every == 0:
        with torch.no_grad():
            model(dataset.tensors[0][:16])


@recover.run
def train(state):
    may_change_hosts()
    while state.epoch < chosen.epochs:
        sampler.set_epoch(state.epoch)
        for step in state.steps(loader):
            look()
            for images, labels, numbers in step:
                losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
                losses.mean().backward()
                state.losses.value.append([state.epoch, numbers.tolist(), losses.tolist()])
                may_be_slow()
                may_be_killed()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            state.step += 1
            if state.step % chosen.commit_every == 0:
                state.commit()
            may_change_hosts()
            time.sleep(chosen.step_seconds)
        state.epoch += 1


train(state)
