"""Gradients that real ranks make together; each check's own text is in the script that the ranks run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import IS_LONG
from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "tensorflow_gradients.py"
OPTIMIZERS = ["sgd", "adam", "clipped", "loss_scale"]
EACH_WAY = {
    "tape_or_optimizer": OPTIMIZERS,
    "option": ["default", "fp16", "sum", "predivided", "sparse_as_dense"],
    "groups_of_variables": ["tape", "optimizer"],
    "sync_batch_norm": ["layers"],
    "broadcast_of_variables": ["copied", "in_place", "broadcast_"],
    "several_passes": [*OPTIMIZERS, "sparse"],
    "variables_of_all_kinds": ["tape", "reduction"],
    "the_same_variables_twice_at_once": ["in_a_row", "in_scopes", "in_functions", "in_a_loop"],
    "ranks_of_different_histories": ["adam"],
    "infinite_gradients_on_one_rank": ["tape", "optimizer"],
}
# Each check traces its graphs, for seconds.
GLOO = [
    *(
        f"{name}-{variant}-{way}"
        for name, variants in EACH_WAY.items()
        for number, variant in enumerate(variants)
        for way in ("graph", "eager")
        if IS_LONG or (number == 0 and (way == "graph" or name == "tape_or_optimizer"))
    ),
    "traced_again",
    "fit_with_compilation_left_to_keras",
    "compilation_without_callbacks_is_refused",
    "fit_that_a_callback_of_one_rank_ends",
    "fit_with_a_callback_that_one_rank_lacks",
]
ENVIRON = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **ROOT_MAY_USE_MPI}

Outcomes = dict[str, list[str]]


def outcomes(launcher: list[str], checks: list[str], folder: Path) -> Outcomes:
    """Run checks in one job; return the problems that each check found, by name."""
    command = [*launcher, sys.executable, str(SCRIPT), ",".join(checks)]
    log = run_job(command, folder / "log", ENVIRON, patience=3 * PATIENCE)
    found = [json.loads(line) for line in re.findall(r"outcome (\{.*\})", log)]
    return {each["check"]: each["problems"] for each in found}


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return outcomes(static(2), GLOO, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("check", GLOO)
def test_two_ranks_with_gloo(gloo: Outcomes, check: str) -> None:
    assert gloo[check] == []
