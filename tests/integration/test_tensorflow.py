"""TensorFlow jobs, in a loop of their own and by ``model.fit``: killed, resumed, resized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.integration.conftest import LONG, Start
from tests.integration.gates import GatedRun
from tests.integration.test_elastic import SIZES, change_hosts, kill_one_rank
from tests.integration.test_kill_and_resume import SLOW, assert_each_sample_once, kill_in_epoch
from tests.support.jobs import DigitsRun, static

WAYS = {"loop": (), "fit": ("--fit",)}

pytestmark = pytest.mark.acceptance


def a_run(
    folder: Path,
    epochs: int,
    way: str,
    *options: str,
    gates: Sequence[int] = (),
    sizes: Mapping[int, int] | None = None,
) -> GatedRun:
    words = (*WAYS[way], *options)
    return GatedRun(folder, epochs, *words, framework="tensorflow", gates=gates, sizes=sizes)


def assert_same_weights(run: DigitsRun, clean: DigitsRun) -> None:
    mine, theirs = np.load(run.weights), np.load(clean.weights)
    assert set(mine) == set(theirs)
    assert len(mine) > 6
    different = [name for name in mine if mine[name].tobytes() != theirs[name].tobytes()]
    assert different == []


# In a loop, `test_faults` reads a durable commit in mid-epoch, and ends with the same weights.
@pytest.fixture(
    scope="module",
    params=[pytest.param(("loop", "adam"), marks=LONG), ("fit", "sgd")],
    ids=lambda pair: "-".join(pair),
)
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, DigitsRun]:
    """The way it trains, the optimizer, and a finished run of two workers that nothing happened to."""
    way, optimizer = request.param
    run = a_run(tmp_path_factory.mktemp("undisturbed"), 3, way, "--optimizer", optimizer)
    run.finish(run.start(static(2), {"OMP_NUM_THREADS": "1"}))
    return way, optimizer, run


def test_resumed_in_mid_epoch_it_is_bitwise_equal(
    undisturbed: tuple[str, str, DigitsRun], start: Start, tmp_path: Path
) -> None:
    way, optimizer, clean = undisturbed
    run = a_run(tmp_path, clean.epochs, way, "--optimizer", optimizer, *SLOW, gates=[16])
    kill_in_epoch(run, start(run, static(2)), epoch=1, commits=3)
    assert not run.weights.exists()
    run.finish(start(run, static(2)))
    last = max(batch.commit for batch in run.batches() if batch.generation == 1)
    begun = min(batch.commit for batch in run.batches() if batch.epoch == 1)
    assert begun < run.generations()[2] <= last  # inside the epoch
    assert "resumed from commit" in run.log
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)


@LONG
@pytest.mark.parametrize("way", ["loop", "fit"])
def test_the_other_rank_continues_when_one_is_killed(
    way: str, start: Start, hosts: Path, tmp_path: Path
) -> None:
    kill_one_rank(a_run(tmp_path / "run", 3, way, *SLOW, gates=[20]), 0, start, hosts)


@LONG
def test_a_host_that_joins_and_one_that_leaves_cost_no_step(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", 4, "fit", "--step-seconds", "0.05", sizes=SIZES)
    change_hosts(run, start, hosts)
