"""Train with six virtual ranks. From step 4 on, rank 2 computes one bit of a gradient wrong.

The argument is a folder. Each rank writes ``FOLDER/outcome-RANK.json``: the error, its text, and the
number of steps that were applied.
"""

import json
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover

FIRST_WRONG, WRONG_RANK, STEPS = 4, 2, 8

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters())
samples = TensorDataset(torch.randn(6 * 4 * STEPS, 8))
sampler = recover.ElasticSampler(samples, seed=0)
loader = DataLoader(samples, batch_size=4, sampler=sampler)
state = recover.TorchState(
    model,
    optimizer,
    sampler=sampler,
    virtual_ranks=6,
    guard=recover.Guard(replay=1.0, on_divergence="raise"),
    epoch=0,
    step=0,
)


def compute(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as this rank's processor computes it."""
    if hvd.rank() != WRONG_RANK or state.step < FIRST_WRONG:
        return gradient
    wrong = gradient.clone()
    wrong.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    return wrong


model[0].weight.register_hook(compute)


@recover.run
def train(state: recover.TorchState) -> None:
    sampler.set_epoch(state.epoch)
    for step in state.steps(loader):
        for (inputs,) in step:
            model(inputs).square().mean().backward()
        optimizer.step()
        state.step += 1


outcome = {"error": None}
try:
    train(state)
except recover.OutOfStepError as error:
    outcome |= {"error": type(error).__name__, "text": str(error)}
outcome["steps"] = state.step
Path(sys.argv[1], f"outcome-{hvd.rank()}.json").write_text(json.dumps(outcome))
