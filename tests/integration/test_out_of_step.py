"""Ranks that fall out of step, in real jobs; what the ranks do is in the script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, failing_hosts, read_events, run_job, static

SCRIPTS = Path(__file__).with_name("scripts")
STEPS = 24  # of two ranks, without a fault
EVERY = '{"parameters_every_commits": 1'
FAULTS = {
    "none": "none",
    "layer": "layer",
    "rate": "rate",
    "seed": "seed",
    "guard": "guard",
    "flip": f"flip {EVERY}}}",
    "flip_heal": f'flip {EVERY}, "on_divergence": "heal"}}',
    "flip_warn": f'flip {EVERY}, "on_divergence": "warn"}}',
    "nan": "nan",
    "nan_skip": 'nan {"numerics": "skip"}',
    "nan_rollback": 'nan {"numerics": "rollback"}',
    "nan_budget": 'nan {"numerics": "skip", "numerics_budget": 1}',
    "poison_rollback": 'poison {"numerics": "rollback"}',
    "flip_in_many": f"flip_in_many {EVERY}}}",
}

Outcome = dict[str, Any]

# Seconds; the first test waits for the whole job, which may be slow
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


def outcomes(
    launcher: list[str], size: int, faults: list[str], folder: Path, framework: str = "torch"
) -> list[list[Outcome]]:
    script = SCRIPTS / f"{framework}_out_of_step.py"
    environ = {"OMP_NUM_THREADS": "1", "HVDRECOVER_EVENTS": str(folder / "events"), **ROOT_MAY_USE_MPI}
    command = [*launcher, sys.executable, str(script), str(folder), *faults]
    run_job(command, folder / "log", environ, patience=3 * PATIENCE)
    return [
        [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(size)]
        for number in range(len(faults))
    ]


def events(folder: Path, kind: str, rank: int) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "events", kind) if event["rank"] == rank]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    found = outcomes(static(2), 2, list(FAULTS.values()), tmp_path_factory.mktemp("of_two"))
    return dict(zip(FAULTS, found, strict=True))


def the_same(outcome: list[Outcome]) -> Outcome:
    assert outcome == [outcome[0]] * len(outcome)
    return outcome[0]


def test_ranks_in_step_are_left_alone(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["none"])
    assert (outcome["error"], outcome["steps"], outcome["updates"]) == (None, STEPS, STEPS)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("layer", "model.3.weight: float32[1, 16], trained on rank 0; missing on rank 1"),
        ("rate", "optimizer.param_groups.0.lr: 0.01 on rank 0; 0.02 on rank 1"),
        ("seed", "sampler.seed: 0 on rank 0; 1 on rank 1"),
        ("guard", "guard: none on rank 1"),
    ],
)
def test_what_ranks_were_started_with_is_compared(
    of_two: dict[str, list[Outcome]], fault: str, line: str
) -> None:
    for outcome in of_two[fault]:
        assert (outcome["error"], outcome["steps"]) == ("StructureError", 0)
        assert line in outcome["text"]


def test_one_flipped_bit_is_named(of_two: dict[str, list[Outcome]]) -> None:
    for outcome in of_two["flip"]:
        assert (outcome["error"], outcome["steps"]) == ("DivergedError", 6)
        assert "model.3.weight, F32[1, 16]: " in outcome["text"]
        assert "on rank 1 on localhost" in outcome["text"]


def test_one_flipped_bit_in_many_is_named(of_two: dict[str, list[Outcome]]) -> None:
    for outcome in of_two["flip_in_many"]:
        assert (outcome["error"], outcome["steps"]) == ("DivergedError", 6)
        assert "model.4.weight, F32[17000000]: 1 of 17000000 numbers, by " in outcome["text"]


def test_one_flipped_bit_is_healed(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["flip_heal"])
    assert (outcome["error"], outcome["updates"]) == (None, STEPS)
    warned = of_two["flip_warn"]
    assert [each["error"] for each in warned] == [None, None]
    assert warned[0]["weights"] != warned[1]["weights"]


def test_a_bad_sample_is_raised_with_its_number(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["nan"])
    assert (outcome["error"], outcome["steps"]) == ("NumericsError", 0)
    # Of the first batch nobody has told yet how many samples it has.
    where = "rank 1 on localhost, at samples 55 of epoch 0: gradient of model.0.weight"
    assert where in outcome["text"]


def test_a_bad_step_is_skipped_or_rolled_back_by_all(of_two: dict[str, list[Outcome]]) -> None:
    skipped, rolled_back = the_same(of_two["nan_skip"]), the_same(of_two["nan_rollback"])
    # Two epochs have the sample once each. The step is not an update, but the batch was done, or is left out.
    assert (skipped["updates"], skipped["steps"], skipped["left_out"]) == (STEPS - 2, STEPS, None)
    assert (rolled_back["updates"], rolled_back["left_out"]) == (STEPS - 2, [[64, 72]])
    assert rolled_back["weights"] == skipped["weights"]


def test_bad_steps_have_a_budget(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["nan_budget"])
    assert (outcome["error"], outcome["steps"]) == ("NumericsError", 20)
    assert "1 of the last 1000 steps" in outcome["text"]


def test_parameters_that_are_not_finite_are_gone_back_from(of_two: dict[str, list[Outcome]]) -> None:
    outcome, undisturbed = the_same(of_two["poison_rollback"]), the_same(of_two["none"])
    assert outcome["error"] is None
    assert outcome["weights"] == undisturbed["weights"]


def test_a_gradient_that_is_missing_on_one_rank_is_told_once(tmp_path: Path) -> None:
    missing, _ = outcomes(static(2), 2, ["missing", "none"], tmp_path)
    assert (the_same(missing)["error"], the_same(missing)["updates"]) == (None, STEPS)
    told = [event["parameters"] for event in events(tmp_path, "missing_gradients", rank=0)]
    names = ("model.1.inner.bias", "model.1.inner.weight")
    assert told == [[f"{name} on rank 1, in 2 steps" for name in names]]


def test_a_host_that_diverges_twice_is_reported(tmp_path: Path) -> None:
    fault = f'flip_twice_0 {EVERY}, "on_divergence": "heal"}}'
    hosts = ["-np", "3", "-H", "127.0.0.1:1,localhost:2"]
    launcher = [str(Path(sys.executable).with_name("hvdrecover")), "run", "--no-standby", *hosts, "--"]
    ((*found,),) = outcomes(launcher, 3, [fault], tmp_path)
    assert the_same(found)["error"] is None
    diverged = events(tmp_path, "diverged", rank=1)
    assert [(line["ranks"], line["tied"]) for line in diverged] == [([0], False)] * 2
    assert failing_hosts(tmp_path / "events") == {"127.0.0.1": 2}


OF_KERAS = {
    "none": "none {}",
    "nan": "nan {}",
    "nan_skip": 'nan {"numerics": "skip"}',
    "nan_rollback": 'nan {"numerics": "rollback"}',
    "missing": "missing null",
}


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    cases = list(OF_KERAS.values())
    found = outcomes(static(2), 2, cases, tmp_path_factory.mktemp("of_keras"), "tensorflow")
    return dict(zip(OF_KERAS, found, strict=True))


def test_keras_ranks_in_step_are_left_alone(of_keras: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_keras["none"])
    assert (outcome["error"], outcome["steps"], outcome["updates"]) == (None, STEPS, STEPS)


def test_a_bad_sample_is_met_inside_a_graph(of_keras: dict[str, list[Outcome]]) -> None:
    raised = the_same(of_keras["nan"])
    assert (raised["error"], raised["steps"]) == ("NumericsError", 0)
    where = "rank 1 on localhost, at samples 55, 89, 87, 37 of epoch 0: gradient of model.net/one/kernel"
    assert where in raised["text"]
    skipped, rolled_back = the_same(of_keras["nan_skip"]), the_same(of_keras["nan_rollback"])
    assert (skipped["updates"], skipped["steps"], skipped["left_out"]) == (STEPS - 2, STEPS, None)
    assert (rolled_back["updates"], rolled_back["left_out"]) == (STEPS - 2, [[64, 72]])
    assert rolled_back["weights"] == skipped["weights"]


def test_a_gradient_that_is_missing_on_one_rank_is_named(of_keras: dict[str, list[Outcome]]) -> None:
    for outcome in of_keras["missing"]:
        assert (outcome["error"], outcome["steps"]) == ("MissingGradientError", 0)
        assert "\n  net/four/shift: missing on rank 1, there on rank 0\n" in outcome["text"]
        assert "net/three/kernel" not in outcome["text"]
