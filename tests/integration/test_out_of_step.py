"""Ranks that fall out of step, in real jobs; what the ranks do is in the script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.discovery import rests
from hvdrecover.examples.digits_run import PATIENCE, ROOT_MAY_USE_MPI, static
from hvdrecover.launch.job import Job

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
    "infinite": "infinite",
    "poison_rollback": 'poison {"numerics": "rollback"}',
    "shards": "shards",
}

Outcome = dict[str, Any]


def outcomes(
    launcher: list[str], size: int, faults: list[str], folder: Path, framework: str = "torch"
) -> list[list[Outcome]]:
    """Run faults in one job; for each, what came of it on each rank."""
    script = SCRIPTS / f"{framework}_out_of_step.py"
    environ = {"OMP_NUM_THREADS": "1", "HVDRECOVER_EVENTS": str(folder / "events"), **ROOT_MAY_USE_MPI}
    job = Job([*launcher, sys.executable, str(script), str(folder), *faults], folder / "log", environ)
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    return [
        [json.loads((folder / f"{number}-{rank}.json").read_text()) for rank in range(size)]
        for number in range(len(faults))
    ]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    found = outcomes(static(2), 2, list(FAULTS.values()), tmp_path_factory.mktemp("of_two"))
    return dict(zip(FAULTS, found, strict=True))


def the_same(outcome: list[Outcome]) -> Outcome:
    """What came of it on all ranks alike."""
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


def test_a_rank_with_more_batches_is_named_before_it_waits(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["shards"])
    assert outcome["error"] == "ShardsError"
    line = "batches: 12 on rank 0; 13 on rank 1; after batch 12, rank 1 would wait for rank 0"
    assert line in outcome["text"]


def test_one_flipped_bit_is_named(of_two: dict[str, list[Outcome]]) -> None:
    for outcome in of_two["flip"]:
        assert (outcome["error"], outcome["steps"]) == ("DivergedError", 6)
        assert "model.3.weight, F32[1, 16]: " in outcome["text"]
        assert "on rank 1 on localhost" in outcome["text"]


def test_one_flipped_bit_is_healed(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["flip_heal"])
    assert (outcome["error"], outcome["updates"]) == (None, STEPS)
    warned = of_two["flip_warn"]
    assert [each["error"] for each in warned] == [None, None]
    assert warned[0]["weights"] != warned[1]["weights"]


def test_a_bad_sample_is_raised_with_its_number(of_two: dict[str, list[Outcome]]) -> None:
    outcome = the_same(of_two["nan"])
    assert (outcome["error"], outcome["steps"]) == ("NumericsError", 0)
    where = "rank 1 on localhost, at samples 55, 89, 87, 37 of epoch 0: first the input of model"
    assert where in outcome["text"]
    assert "gradient of model.0.weight" in outcome["text"]


def test_the_first_module_whose_output_is_bad_is_named(of_two: dict[str, list[Outcome]]) -> None:
    assert "first the output of model.1 (Gate); then gradient" in the_same(of_two["infinite"])["text"]


def test_a_bad_step_is_skipped_or_rolled_back_by_all(of_two: dict[str, list[Outcome]]) -> None:
    skipped, rolled_back = the_same(of_two["nan_skip"]), the_same(of_two["nan_rollback"])
    # Two epochs have the sample once each. The step is no update, but the batch was done, or is left out.
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


def test_a_host_that_diverges_twice_is_reported(tmp_path: Path) -> None:
    fault = f'flip_twice_0 {EVERY}, "on_divergence": "heal"}}'
    hosts = ["-np", "3", "-H", "127.0.0.1:1,localhost:2"]
    launcher = [str(Path(sys.executable).with_name("hvdrecover")), "run", *hosts, "--"]
    ((*found,),) = outcomes(launcher, 3, [fault], tmp_path)
    assert the_same(found)["error"] is None
    lines = [
        json.loads(line)
        for file in (tmp_path / "events").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    diverged = [line for line in lines if line["kind"] == "diverged" and line["rank"] == 1]
    assert [(line["ranks"], line["tied"]) for line in diverged] == [([0], False)] * 2
    reported = rests.read(tmp_path / "events" / "failing-hosts")
    assert {host: len(times) for host, times in reported.items()} == {"127.0.0.1": 2}


# -- TensorFlow --------------------------------------------------------------------------------------------

OF_KERAS = {
    "none_fit": "none fit {}",
    "none_loop": 'none loop {"numerics": null}',
    "layer": "layer fit {}",
    "rate": "rate loop {}",
    "flip": f"flip fit {EVERY}}}",
    "flip_heal": f'flip loop {EVERY}, "on_divergence": "heal"}}',
    "nan_fit": "nan fit {}",
    "nan_loop": "nan loop {}",
    "nan_skip_fit": 'nan fit {"numerics": "skip"}',
    "nan_skip_loop": 'nan loop {"numerics": "skip"}',
    "nan_rollback_fit": 'nan fit {"numerics": "rollback"}',
    "nan_rollback_loop": 'nan loop {"numerics": "rollback"}',
    "poison_rollback": 'poison fit {"numerics": "rollback"}',
}


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    folder = tmp_path_factory.mktemp("of_keras")
    found = outcomes(static(2), 2, list(OF_KERAS.values()), folder, "tensorflow")
    return dict(zip(OF_KERAS, found, strict=True))


@pytest.mark.parametrize("way", ["fit", "loop"])
def test_keras_ranks_in_step_are_left_alone(of_keras: dict[str, list[Outcome]], way: str) -> None:
    outcome = the_same(of_keras[f"none_{way}"])
    assert (outcome["error"], outcome["steps"], outcome["updates"]) == (None, STEPS, STEPS)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("layer", "net/three/kernel: float32[16, 1], trained on rank 0; missing on rank 1"),
        ("rate", "optimizer.learning_rate: 0.0"),
    ],
)
def test_what_keras_ranks_were_started_with_is_compared(
    of_keras: dict[str, list[Outcome]], fault: str, line: str
) -> None:
    for outcome in of_keras[fault]:
        assert (outcome["error"], outcome["steps"]) == ("StructureError", 0)
        assert line in outcome["text"]


def test_one_flipped_bit_of_a_variable_is_named_and_healed(of_keras: dict[str, list[Outcome]]) -> None:
    for outcome in of_keras["flip"]:
        assert (outcome["error"], outcome["steps"]) == ("DivergedError", 6)
        assert "model.net/three/kernel, F32[16, 1]: 1 of 16 numbers" in outcome["text"]
    assert the_same(of_keras["flip_heal"])["error"] is None


@pytest.mark.parametrize("way", ["fit", "loop"])
def test_a_bad_sample_is_met_inside_a_graph(of_keras: dict[str, list[Outcome]], way: str) -> None:
    raised = the_same(of_keras[f"nan_{way}"])
    assert (raised["error"], raised["steps"]) == ("NumericsError", 0)
    where = "rank 1 on localhost, at samples 55, 89, 87, 37 of epoch 0: gradient of model.net/one/kernel"
    assert where in raised["text"]
    skipped = the_same(of_keras[f"nan_skip_{way}"])
    rolled_back = the_same(of_keras[f"nan_rollback_{way}"])
    assert (skipped["updates"], skipped["steps"], skipped["left_out"]) == (STEPS - 2, STEPS, None)
    assert (rolled_back["updates"], rolled_back["left_out"]) == (STEPS - 2, [[64, 72]])
    assert rolled_back["weights"] == skipped["weights"]


def test_variables_that_are_not_finite_are_gone_back_from(of_keras: dict[str, list[Outcome]]) -> None:
    outcome, undisturbed = the_same(of_keras["poison_rollback"]), the_same(of_keras["none_fit"])
    assert outcome["error"] is None
    assert outcome["weights"] == undisturbed["weights"]
