"""Training that is to be looked at: of the last rank, the data are slow.

::

    horovodrun -np 2 python torch_scalars.py FOLDER [STOP-AFTER-STEP]

Writes TensorBoard's runs to ``FOLDER/logs``, and each rank's losses by step to ``FOLDER/losses-RANK.json``.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, Dataset

import hvdrecover.torch as recover

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 96, 4, 3, 4
SLOWNESS = 0.1  # seconds for a sample: more than the noise of a busy machine


class Data(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, slowness: float) -> None:
        self.slowness = slowness
        self.inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.slowness)
        return self.inputs[number], self.inputs[number].sum(0, keepdim=True)


def end_when_all_have_written(folder: Path) -> None:
    """Have this rank end only after all ranks have written their scalars: horovodrun ends the others at once.

    `atexit` calls the first registered function last, so call this before anything else registers one.
    """

    def wait() -> None:
        (folder / f"ends-{hvd.rank()}").touch()
        while len(list(folder.glob("ends-*"))) < hvd.size():
            time.sleep(0.05)

    atexit.register(wait)


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    folder, stop = Path(sys.argv[1]), int((*sys.argv[2:], "0")[0])
    if stop:
        end_when_all_have_written(folder)
    losses = folder / f"losses-{hvd.rank()}.json"
    told = json.loads(losses.read_text()) if losses.exists() else {}
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters()
    )
    data = Data(SLOWNESS if hvd.rank() == hvd.size() - 1 else 0.0)
    sampler = recover.ElasticSampler(data, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    state = recover.TorchState(
        model,
        optimizer,
        sampler=sampler,
        epoch=0,
        step=0,
        checkpoint=str(folder / "commits"),
        tensorboard=str(folder / "logs"),
    )

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.epoch < EPOCHS:
            sampler.set_epoch(state.epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                sampler.record_batch(state.step, len(inputs))
                state.step += 1
                state.log_metrics(loss=loss, rate=0.001)
                told[str(state.step)] = float(loss.detach())
                losses.write_text(json.dumps(told))
                if state.step % COMMIT_EVERY == 0:
                    state.commit(durable=True)
                if state.step == stop:
                    state.flush()
                    sys.exit("stopped")
            state.epoch += 1

    train(state)


if __name__ == "__main__":
    main()
