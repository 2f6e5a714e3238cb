"""Train on a Ray cluster, whatever becomes of its processes and nodes.

    ray job submit --working-dir . -- python train.py file:///shared/run-1

Started again, it resumes from the newest commit under that URL, which all nodes must reach.
"""

import functools
import sys

import horovod.torch as hvd
import torch

import hvdrecover.ray
import hvdrecover.torch as recover


def train(steps: int) -> float:
    """Fit a line to numbers, and return the loss."""
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    state = recover.TorchState(model=model, optimizer=optimizer, step=0, loss=0.0)

    @recover.run
    def loop(state: recover.TorchState) -> float:
        while state.step < steps:
            inputs = torch.randn(32, 8)
            optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            state.step += 1
            state.loss = loss.item()
            state.commit()  # the job can go back to here
        return state.loss

    return loop(state)


if __name__ == "__main__":
    # Two processes with a CPU each, up to four if there is room; with gpus=1, a GPU each as well.
    loss = hvdrecover.ray.run(functools.partial(train, 200), processes=2, most=4, checkpoint=sys.argv[1])
    print(f"loss of rank 0: {loss}")
