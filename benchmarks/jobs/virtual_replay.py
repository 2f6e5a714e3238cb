"""Steps of which some are replayed: ``horovodrun -np 2 python -m … SIZE STATE FOLDER``."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from benchmarks.measure import stopwatch
from benchmarks.states import Setting
from hvdrecover.virtual.replay import plan
from hvdrecover.virtual.steps import Step

RESULT = "replay.json"
_VIRTUAL, _OFTEN, _SHARE = 2, 0.5, 1e-3
_WIDTH, _BATCH = {"full": 1024, "small": 32}, {"full": 256, "small": 4}
_WARMUPS = 5


def steps_of(setting: Setting) -> tuple[list[float], list[float]]:
    """Milliseconds of steps at the share, and of the same steps without replays.

    The time that a replayed step takes longer than others counts by the share, that of drawing in full.
    """
    torch.manual_seed(1)
    width, batch, rounds = _WIDTH[setting.size], _BATCH[setting.size], max(16, setting.rounds(80))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1e-3), model.named_parameters())
    dataset = TensorDataset(torch.randn((_WARMUPS + rounds) * _VIRTUAL * batch, width))
    sampler = recover.ElasticSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    guard = recover.Guard(replay=_OFTEN)
    state = recover.TorchState(model, optimizer, sampler=sampler, virtual_ranks=_VIRTUAL, guard=guard)
    took: list[float] = []

    @recover.run
    def train(state: recover.TorchState) -> None:
        for step in state.steps(loader):
            took.append(1e3 * stopwatch(lambda step=step: whole(step)))  # type: ignore[misc]

    def whole(step: Step) -> None:
        for (inputs,) in step:
            model(inputs).square().mean().backward()
        optimizer.step()

    train(state)
    seed = state._session.own.random.seed
    drawing = 1e3 * stopwatch(lambda: plan(seed, 1, (1, 1), 0.0, calibrate=False))
    replayed = {
        number
        for number in range(len(took))
        if plan(seed, number, (1, 1), _OFTEN, calibrate=False) is not None
    }
    plain = [each for number, each in enumerate(took) if number >= _WARMUPS and number not in replayed]
    longer = statistics.median(took[number] for number in replayed if number >= _WARMUPS)
    extra = _SHARE * (longer - statistics.median(plain)) + drawing
    return [each + extra for each in plain], plain


if __name__ == "__main__":
    chosen = Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    hvd.init()
    torch.set_num_threads(1)
    values = steps_of(chosen)
    if hvd.rank() == 0:
        (chosen.folder / RESULT).write_text(json.dumps(values))
