"""Ten virtual ranks, one of two processes slow: ``horovodrun -np 2 python -m … SIZE STATE FOLDER``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from benchmarks.measure import stopwatch
from benchmarks.states import Setting
from hvdrecover.virtual.ranks import Policy

RESULT = "shares.json"
_VIRTUAL, _SLOWED = 10, 4
_WIDTH, _BATCH = {"full": 512, "small": 32}, {"full": 128, "small": 4}
_SETTLES = 5  # steps, of which each ends with a commit, until speeds are known


def steps_of(policy: Policy, setting: Setting) -> list[float]:
    """Milliseconds of steps, once shares have settled."""
    torch.manual_seed(1)
    width, batch, rounds = _WIDTH[setting.size], _BATCH[setting.size], setting.rounds(20)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    dataset = TensorDataset(torch.randn((_SETTLES + rounds) * _VIRTUAL * batch, width))
    sampler = recover.ElasticSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    state = recover.TorchState(model, optimizer, sampler=sampler, virtual_ranks=_VIRTUAL, shares=policy)
    found: list[float] = []

    def part(inputs: torch.Tensor) -> None:
        took = stopwatch(lambda: model(inputs).square().mean().backward())
        time.sleep((_SLOWED - 1) * took * (hvd.rank() == 1))

    @recover.run
    def train(state: recover.TorchState) -> None:
        begun = time.perf_counter()
        for step in state.steps(loader):
            for (inputs,) in step:
                part(inputs)
            optimizer.step()
            state.commit()
            ended = time.perf_counter()
            found.append(1e3 * (ended - begun))
            begun = ended

    train(state)
    return found[_SETTLES:]


if __name__ == "__main__":
    chosen = Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    hvd.init()
    torch.set_num_threads(1)
    values = [steps_of("by-speed", chosen), steps_of("equal", chosen)]
    if hvd.rank() == 0:
        (chosen.folder / RESULT).write_text(json.dumps(values))
