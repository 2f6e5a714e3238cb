"""Commits outside a job: `load`, and files for other programs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import hvdrecover.torch as recover
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.cli import main
from hvdrecover.errors import ConfigError, MismatchError
from tests.unit.checkpoint.roots import content
from tests.unit.torch.jobs import bits, commit_durably, joined, network, state_of, train_one_step


@dataclasses.dataclass
class Schedule:
    rate: float


@pytest.fixture
def job(tmp_path: Path) -> dict[int, Any]:
    """A root at ``tmp_path / "root"`` with the commits 1, 2 and 3; what model and optimizer were at each."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    state = joined(
        str(tmp_path / "root"),
        model=model,
        optimizer=optimizer,
        sampler=recover.ElasticSampler(range(7), seed=3),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        schedule=Schedule(0.1),
        epoch=0,
    )
    found = {}
    for number in (1, 2, 3):
        train_one_step(model, optimizer)
        state.epoch = number
        commit_durably(state)
        found[number] = state_of(model), state_of(optimizer)
    assert len(set(map(repr, found.values()))) == 3
    return found


@pytest.fixture
def url(job: dict[int, Any], tmp_path: Path) -> str:
    return str(tmp_path / "root")


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = network(seed=9)
    return model, torch.optim.AdamW(model.parameters())


def test_the_model_alone_is_loaded_and_the_root_left_as_it_is(url: str, job: dict[int, Any]) -> None:
    Path(url, "g0001-c00000003/optimizer.safetensors").unlink()  # not needed, so not read
    before = content(LocalStorage(Path(url)))
    model, optimizer = fresh()
    untouched = state_of(optimizer)
    loaded = recover.load(url, model=model)
    assert state_of(model) == job[3][0]
    assert state_of(optimizer) == untouched
    assert (loaded.commit.commit, loaded.world_size, loaded.finished) == (3, 1, False)
    assert (loaded.versions["torch"], loaded.not_loaded) == (torch.__version__, ())
    assert content(LocalStorage(Path(url))) == before


def test_what_is_loaded_continues_to_the_last_bit(url: str, job: dict[int, Any]) -> None:
    model, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    recover.load(url, model=model, optimizer=optimizer, scheduler=scheduler, commit=2)
    assert (state_of(model), state_of(optimizer)) == job[2]
    train_one_step(model, optimizer)
    assert (state_of(model), state_of(optimizer)) == job[3]


def test_tensors_that_do_not_fit_are_named_and_the_others_loaded_if_not_strict(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    untouched = state_of(model)
    with pytest.raises(MismatchError) as caught:
        recover.load(url, model=model)
    assert caught.value.differences == [
        "model.0.bias: F32[4] in the commit, F32[5] in the model",
        "model.0.weight: F32[4, 3] in the commit, F32[5, 3] in the model",
        "model.2.weight: F32[2, 4] in the commit, F32[2, 5] in the model",
    ]
    assert state_of(model) == untouched
    whole, _ = fresh()
    recover.load(url, model=whole)
    loaded = recover.load(url, model=model, strict=False)
    assert torch.equal(model.state_dict()["2.bias"], whole.state_dict()["2.bias"])
    assert list(loaded.not_loaded) == caught.value.differences
    assert all(line in caplog.text for line in loaded.not_loaded)


@pytest.mark.parametrize("given", [{}, {"epoch": 0}, {"sampler": recover.ElasticSampler(range(7))}])
def test_what_can_not_be_loaded_into_is_refused(url: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given), 'load')}: "):
        recover.load(url, **given)


def test_plain_objects_and_cursors_are_in_the_result(url: str) -> None:
    objects = recover.load(url, model=network(), commit=2).objects
    assert set(objects) == {"epoch", "schedule", "scheduler", "sampler"}
    assert (objects["epoch"], objects["schedule"]) == (2, Schedule(0.1))
    sampler = recover.ElasticSampler(range(7), seed=3)
    sampler.load_state_dict(objects["sampler"])
    with pytest.raises(MismatchError):
        recover.ElasticSampler(range(8), seed=3).load_state_dict(objects["sampler"])


class Tied(torch.nn.Module):
    """Modules, a buffer, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.arange(3, dtype=torch.bfloat16))


def test_a_models_file_loads_with_safetensors_under_its_own_names_and_tied_weights_stay_tied(
    tmp_path: Path,
) -> None:
    model = Tied()
    commit_durably(joined(str(tmp_path / "root"), model=model))
    found = safetensors.torch.load_file(tmp_path / "root" / "g0001-c00000001" / "model.safetensors")
    state = dict(model.state_dict())
    assert found.keys() == state.keys()
    assert bits(found) == bits({name: state[name] for name in found})
    other = Tied()
    recover.load(str(tmp_path / "root"), model=other)
    assert other.head.weight is other.embedding.weight
    assert state_of(other) == state_of(model)


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def test_a_torch_file_is_loaded_without_running_code(url: str, job: dict[int, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    only = [f"--only={name}" for name in ("model", "optimizer", "scheduler", "sampler", "epoch")]
    before = content(LocalStorage(Path(url)))
    assert export(url, 2, "-o", file, *only) == 0
    found = torch.load(file, weights_only=True)
    assert list(found) == ["model", "optimizer", "scheduler", "epoch", "sampler"]
    assert (found["epoch"], found["sampler"]["seed"]) == (2, 3)
    model, optimizer = fresh()
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    assert (state_of(model), state_of(optimizer)) == job[2]
    assert content(LocalStorage(Path(url))) == before


def test_a_torch_file_of_an_object_that_needs_code_is_refused(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(url, 2, "-o", tmp_path / "x.pt") == 1
    assert re.search(r"can't hold schedule \(.*\.Schedule\); ", " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "x.pt").exists()
