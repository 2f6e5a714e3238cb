"""The things that a drill learns of a torch job's steps."""

from __future__ import annotations

from typing import Any

import torch

from hvdrecover.torch import witness


class Listener:
    """Takes what a witness is told."""

    def __init__(self) -> None:
        self.agreements = 1
        self.inputs: list[str | None] = []

    def step_begins(self, inputs: str | None = None) -> None:
        self.inputs.append(inputs)


def watched() -> tuple[Listener, torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listener = Listener()
    components: dict[str, Any] = {"model": model, "optimizer": optimizer}
    witness.watch(components, listener)
    return listener, model, optimizer


def test_a_step_is_told_with_what_the_model_was_given() -> None:
    listener, model, optimizer = watched()
    for value in (1.0, 2.0, 1.0):
        model(torch.full((4, 2), value)).sum().backward()
        optimizer.step()
    first, second, third = listener.inputs
    assert first == third != second


def test_a_batch_whose_step_a_fault_has_prevented_is_no_part_of_the_next_one() -> None:
    listener, model, optimizer = watched()
    for value in (1.0, 2.0):
        model(torch.full((4, 2), value)).sum().backward()
        optimizer.step()
    model(torch.full((4, 2), 2.0))  # then a rank is lost, and the others have another rendezvous
    listener.agreements += 1
    model(torch.full((4, 2), 1.0)).sum().backward()
    optimizer.step()
    assert listener.inputs[2] == listener.inputs[0]


def test_evaluations_are_no_part_of_a_step() -> None:
    listener, model, optimizer = watched()
    for evaluates in (False, True):
        if evaluates:
            with torch.no_grad():
                model(torch.zeros(4, 2))
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    assert listener.inputs[0] == listener.inputs[1]
