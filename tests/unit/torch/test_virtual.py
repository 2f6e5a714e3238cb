"""Virtual ranks of torch, in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import horovod.torch as hvd
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError, StepError
from hvdrecover.state.rank_local import Carried, PerRank, RankLocalState, stream
from hvdrecover.torch.elastic.sampler import ElasticSampler
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.virtual import Buffers, Gradients, feed
from tests.unit.torch.jobs import joined, network, wrapped

# -- buffers of modules, one set for each virtual rank -------------------------------------------------------


ALL = Carried((0, 1), 2)


class Masked(torch.nn.Module):
    """Batch norm and a table that no step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(12.0).view(4, 3))
        self.register_buffer("nothing", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(inputs + self.table)
        return normed


def part(buffers: Buffers, module: Masked, rank: int, value: float) -> None:
    """One virtual rank's forward pass."""
    buffers.swap_in(rank)
    module(value * torch.arange(12.0).view(4, 3))
    buffers.swap_out(rank)


def test_a_commit_has_what_changes_and_its_model_virtual_rank_0s() -> None:
    module = Masked()
    buffers = Buffers({"model": module})
    part(buffers, module, 0, 1.0)
    part(buffers, module, 1, 5.0)
    states = buffers.states(ALL)
    names = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {rank: set(own) for rank, own in states.items()} == {0: names, 1: names}
    buffers.gathered(states)
    alone = Masked()
    alone(torch.arange(12.0).view(4, 3))
    for one, other in zip(module.buffers(), alone.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_the_script_changes_outside_of_parts_stays(ranks: int) -> None:
    """The average of 1, 2, 3 over the steps of a process with so many virtual ranks."""
    model, carried = Masked(), Carried(tuple(range(ranks)), ranks)
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    buffers = Buffers({"model": model, "averaged": averaged})
    for value in (1.0, 2.0, 3.0):
        buffers.absorb()
        for rank in range(ranks):
            part(buffers, model, rank, value)
        model.weight.data.fill_(value)
        averaged.update_parameters(model)
        buffers.gathered(buffers.states(carried))
        assert averaged.n_averaged == value
    assert "averaged.n_averaged" not in buffers.states(carried)[0]
    assert averaged.module.weight.item() == pytest.approx(2.0)


@pytest.mark.parametrize("moment", [Buffers.absorb, lambda buffers: buffers.states(ALL)])
def test_batch_norm_after_the_parts_and_before_the_commit_is_refused(
    moment: Callable[[Buffers], object],
) -> None:
    module = Masked()
    buffers = Buffers({"model": module})
    part(buffers, module, 0, 1.0)
    module(torch.ones(4, 3))
    with pytest.raises(StepError, match=r"^model\.norm\.running_mean: .*state\.commit\(\)"):
        moment(buffers)


# -- collectives in the part of a virtual rank ---------------------------------------------------------------


DATA = torch.arange(12.0).view(4, 3)
ONE = torch.ones(1)


class Averaging(torch.autograd.Function):
    """Sums its gradient up over processes."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return recover.allreduce(gradient, op=recover.Sum, name="mine")


@pytest.mark.parametrize(
    ("use", "call"),
    [
        (lambda: recover.allreduce(ONE), "allreduce"),
        (lambda: recover.synchronize(recover.allreduce_async_(ONE, name="mine")), "allreduce"),
        (lambda: recover.grouped_allreduce([ONE, ONE], name="mine"), "grouped_allreduce"),
        (lambda: hvd.allgather(ONE, name="mine"), "allgather"),
        (lambda: recover.broadcast_object(1, name="mine"), "broadcast"),
        (lambda: recover.broadcast_parameters({"one": ONE}, 0), "broadcast"),
        (lambda: recover.alltoall(ONE), "alltoall"),
        (lambda: recover.reducescatter(ONE), "reducescatter"),
        (recover.join, "join"),
        (recover.barrier, "barrier"),
        (lambda: Averaging.apply(ONE.clone().requires_grad_()).sum().backward(), "allreduce"),
    ],
)
def test_every_collective_is_refused_there_and_there_only(use: Callable[[], Any], call: str) -> None:
    model, sampler = network(), recover.ElasticSampler(DATA)
    state = joined(model=model, optimizer=wrapped(model), sampler=sampler, virtual_ranks=2)
    use()
    parts = iter(next(state.steps(DataLoader(DATA, batch_size=1, sampler=sampler))))  # type: ignore[arg-type]
    next(parts)
    with pytest.raises(StepError, match=rf"^hvd\.{call}\(\): .* after "):
        use()
    parts.close()  # type: ignore[attr-defined]
    use()


# -- batches dealt out to virtual ranks ----------------------------------------------------------------------


SIZE = 4


class Noisy(Dataset[Any]):
    """Sample numbers with noise."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.5 * torch.rand(())


class Ranks:
    """The facts about virtual ranks that a feed asks for."""

    def __init__(self, *carried: int) -> None:
        self.carried = Carried(carried, SIZE)
        self.steps = 0

    def sample_seeds(self, step: int, rank: int) -> Callable[[str], int]:
        return stream(7, f"samples {step}", rank)

    def any_has_more(self, mine: bool) -> bool:
        return mine


def sampler_of(dataset: Any) -> ElasticSampler:
    sampler = ElasticSampler(dataset, seed=3)
    sampler.order.dealt_to = lambda: ((0,), SIZE)
    sampler.order.place(0, 1)
    return sampler


def batches(*carried: int, workers: int = 0, skip: int = 0) -> list[dict[int, list[float]]]:
    """Go through an epoch; return each step's batches by virtual rank."""
    sampler = sampler_of(Noisy())
    sampler.order.record(2 * skip)
    loader = DataLoader(Noisy(), batch_size=2, sampler=sampler, num_workers=workers)
    ranks: Any = Ranks(*carried)
    ranks.steps = skip
    found = []
    for step in feed(loader, {"sampler": sampler}, TorchFramework())(ranks):
        found.append({rank: step.fetch(rank).tolist() for rank in carried})
        step.done()
        ranks.steps += 1
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_who_reads_them_does_not_matter(workers: int) -> None:
    """Not for which samples they are, and not for the noise."""
    expected = batches(0, 1, 2, 3)
    found = [
        {**one, **other} for one, other in zip(batches(0, workers=workers), batches(1, 2, 3), strict=True)
    ]
    assert found == expected
    assert batches(1, 3, skip=2) == [{rank: each[rank] for rank in (1, 3)} for each in expected[2:]]


def test_each_pass_has_the_same_number_of_steps_also_without_set_epoch() -> None:
    sampler = recover.ElasticSampler(Noisy())
    state = joined(model=network(), sampler=sampler, virtual_ranks=2)
    loader = DataLoader(Noisy(), batch_size=4, sampler=sampler, drop_last=True)
    passes = [[len(list(step)) for step in state.steps(loader)] for _ in range(3)]
    assert passes == [[2, 2, 2]] * 3


def own_batches(sampler: ElasticSampler) -> Any:
    class Own(BatchSampler):
        pass

    loader = DataLoader(Noisy(), batch_sampler=Own(sampler, 2, drop_last=False))
    vars(loader)["sampler"] = sampler
    return loader


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda sampler: [1, 2], "a list .*ElasticSampler"),
        (lambda sampler: PerRank([1]), "a PerRank .*ElasticSampler"),
        (lambda sampler: DataLoader(Noisy(), sampler=sampler_of(Noisy())), "a DataLoader .*ElasticSampler"),
        (own_batches, "batch_size=.*batch_sampler"),
    ],
)
def test_what_cannot_be_dealt_out(make: Callable[[ElasticSampler], Any], fact: str) -> None:
    sampler = sampler_of(Noisy())
    with pytest.raises(ConfigError, match=rf"^state\.steps\(\): .*{fact}"):
        feed(make(sampler), {"sampler": sampler}, TorchFramework())


def test_a_sampler_of_virtual_ranks_is_not_gone_through_without_steps() -> None:
    sampler = sampler_of(Noisy())
    with pytest.raises(StepError, match=r"^sampler: .*state\.steps\(loader\)"):
        next(iter(sampler))
    with pytest.raises(StepError, match=r"^sampler: .*record_batch\(\)"):
        sampler.record_batch(0, 2)


def test_loaders_that_know_their_place_continue_when_shares_change() -> None:
    loaders = PerRank(lambda rank, size: StatefulDataLoader(range(4), batch_size=None))
    loaders.become_virtual(SIZE, lambda: 0)
    framework, ranks = TorchFramework(), cast(Any, Ranks(1, 2))
    world = cast(Any, SimpleNamespace(size=lambda: 1))
    own = RankLocalState(framework, world, ranks, {"loaders": loaders}, "reseed")
    found = []
    for step in feed(loaders, {"loaders": loaders}, TorchFramework())(ranks):
        found.append(int(step.fetch(1)))
        break
    own.gather()
    own.move(Carried((1,), SIZE))
    ranks.carried = Carried((1,), SIZE)
    steps = feed(loaders, {"loaders": loaders}, TorchFramework())(ranks)
    assert found + [int(step.fetch(1)) for step in steps] == [0, 1, 2, 3]


def test_a_step_is_not_counted_in_the_next_epoch() -> None:
    sampler = sampler_of(Noisy())
    ranks: Any = Ranks(0)
    loader = DataLoader(Noisy(), batch_size=2, sampler=sampler)
    step = next(feed(loader, {"sampler": sampler}, TorchFramework())(ranks))
    sampler.set_epoch(1)
    step.done()
    assert sampler.processed_num == 0


# -- one process that has all virtual ranks; tests/integration has what several do together ------------------


class Own(hvd.Compression.none):  # type: ignore[misc]
    """A way to compress of a user's."""


def loss(model: torch.nn.Module, virtual_rank: int) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 15).view(5, 3) * (virtual_rank + 1)).square().sum()


def step(gradients: Gradients, backward: Callable[[int], object], size: int = 1) -> None:
    gradients.begin()
    for virtual_rank in range(size):
        backward(virtual_rank)
        gradients.part_ends(virtual_rank)
    gradients.finish([1], 0)


def bracketed(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return bracketed(values[:half]) + bracketed(values[half:])


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_are_those_of_the_tree(size: int, op: Any) -> None:
    model = network()
    gradients = Gradients("optimizer", wrapped(model, op=op), size)
    parameters = list(model.parameters())
    leaves = [torch.autograd.grad(loss(model, each), parameters) for each in range(size)]
    step(gradients, lambda each: loss(model, each).backward(), size)  # type: ignore[no-untyped-call]
    for each, *parts in zip(parameters, *leaves, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, bracketed(parts) / (size if op == hvd.Average else 1))


def test_a_gradient_that_some_virtual_ranks_lack() -> None:
    other, nowhere = (torch.nn.Parameter(torch.ones(size)) for size in (3, 2))
    bare = torch.optim.SGD([*network().parameters(), other, nowhere], lr=0.1)
    gradients = Gradients("optimizer", hvd.DistributedOptimizer(bare), 4)
    total = (other * 6).sum()
    step(gradients, lambda each: total.backward() if each == 2 else None, 4)  # type: ignore[no-untyped-call]
    assert other.grad is not None and nowhere.grad is not None
    assert (other.grad.tolist(), nowhere.grad.tolist()) == ([1.5] * 3, [0.0] * 2)


def test_a_gradient_in_another_layout_gets_that_of_its_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gradients = Gradients("optimizer", hvd.DistributedOptimizer(torch.optim.SGD([parameter])), 1)
    values = torch.arange(120.0).view(2, 3, 4, 5)
    step(gradients, lambda _: setattr(parameter, "grad", values.clone()))
    assert parameter.grad is not None
    assert parameter.grad.stride() == parameter.stride() and torch.equal(parameter.grad, values)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters()),
        lambda model: wrapped(model, gradient_predivide_factor=2.0),
        lambda model: wrapped(model, op=hvd.Min),
        lambda model: wrapped(model, compression=Own),
    ],
)
def test_what_can_not_be_summed_is_refused(make: Callable[[torch.nn.Module], Any]) -> None:
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*DistributedOptimizer with op=Average"):
        Gradients("optimizer", make(network()), 2)


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients_are_refused_unless_made_dense(dense: bool) -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    gradients = Gradients("optimizer", wrapped(layer, sparse_as_dense=dense), 1)
    total = layer(torch.tensor([1])).sum()
    with nullcontext() if dense else pytest.raises(ConfigError, match="sparse_as_dense=True"):
        step(gradients, lambda _: total.backward())
        assert layer.weight.grad is not None
        assert torch.equal(layer.weight.grad, torch.tensor([[0.0, 0], [1, 1], [0, 0], [0, 0]]))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_no_step_without_gradients_of_a_whole_step(begun: bool, skips: bool) -> None:
    model = network()
    optimizer = wrapped(model)
    gradients = Gradients("optimizer", optimizer, 2)
    before = [each.detach().clone() for each in model.parameters()]
    if begun:
        step(gradients, lambda each: loss(model, each).backward(), 2)  # type: ignore[no-untyped-call]
        gradients.begin()
    loss(model, 0).backward()  # type: ignore[no-untyped-call]
    with (
        pytest.raises(ConfigError, match=r"^state\.optimizer: .*for part in step"),
        optimizer.skip_synchronize() if skips else nullcontext(),
    ):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("change", ["added", "unfrozen"])
def test_parameters_that_come_later_are_refused(change: str) -> None:
    model, later = network(), torch.nn.Parameter(torch.zeros(7), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), later], lr=0.1))
    gradients = Gradients("optimizer", optimizer, 2)
    gradients.begin()
    if change == "added":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
    else:
        later.requires_grad_()
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*\(7,\)"):
        gradients.begin()
