from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hvdrecover.drill import faults, storage
from hvdrecover.drill.faults import FAULTS, RESIZING, Fault, find
from hvdrecover.errors import ConfigError
from tests.unit.drill.drilled import Counting


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counting]:
    with ExitStack() as stack:
        yield Counting(tmp_path_factory.mktemp("run"), stack, ranks=1)


def classes() -> set[type]:
    """Every class of the package that strikes and has a name."""
    modules = (module for _, module in inspect.getmembers(faults, inspect.ismodule))
    members = (each for module in modules for _, each in inspect.getmembers(module, inspect.isclass))
    return {each for each in members if dataclasses.is_dataclass(each) and hasattr(each, "strike")}


def test_every_fault_is_registered_once() -> None:
    assert {type(fault) for fault in FAULTS.values()} == classes()
    assert len(FAULTS) == len(classes()) == len({fault.summary for fault in FAULTS.values()})


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_can_be_listed_stored_and_made_again(fault: Fault) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fault.name)
    assert fault.summary[0].islower() and not fault.summary.endswith(".")
    fields = json.loads(json.dumps(dataclasses.asdict(fault)))  # type: ignore[call-overload]
    assert type(fault)(**fields) == fault
    with pytest.raises(dataclasses.FrozenInstanceError):
        fault.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_that_is_not_under_way_can_be_ended(
    run: Counting, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "data", run.folder / "0")
    fault.prepare(run)
    fault.end(run)
    fault.clean_up(run)
    assert run.alive() == list(run.children)


def test_those_that_change_the_number_of_ranks_are_faults() -> None:
    assert {fault.name for fault in find(RESIZING)} == {"resize", "kill", "kill-rank-0", "kill-all"}


def test_faults_are_found_in_the_order_of_their_names() -> None:
    assert [fault.name for fault in find(["storage-away", "kill", "kill"])] == [
        "storage-away",
        "kill",
        "kill",
    ]
    assert find([]) == []


@pytest.mark.parametrize(("name", "near"), [("storage-a-way", "storage-away"), ("kil", "kill"), ("", "")])
def test_an_unknown_fault_is_an_error_that_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"^--faults: .*'{name}'; .*'{near}") as caught:
        find(["kill", name])
    assert all(each in str(caught.value) for each in FAULTS)


def test_what_is_lacking_is_said_with_the_remedy(run: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(run.folder))  # no compiler there
    lacking = {name: why for name, fault in FAULTS.items() if (why := fault.lacks(run))}
    assert set(lacking) == {
        "data-changed",
        "clock-jump",
        "host-cut-off",
        "host-powered-off",
        "resize",
        "tmpfs-full",
    }
    assert "--data" in lacking["data-changed"]
    assert "apt-get install gcc" in lacking["clock-jump"]
    assert "--lab" in lacking["host-cut-off"]
    assert "root" in lacking["tmpfs-full"]
    assert "--resize" in lacking["resize"]


def test_a_file_system_that_fsspec_does_not_know_is_said_to_be_missing(
    run: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PROTOCOL", "no-such-protocol")
    assert "install it again" in FAULTS["storage-away"].lacks(run)
