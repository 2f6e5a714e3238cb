"""The commits that are deleted: a pure decision."""

import math

import numpy as np
import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.retention import Facts, expired, metric_of
from hvdrecover.checkpoint.settings import Best, Keep
from hvdrecover.checkpoint.values import encode

NOW = 1000.0


def run(*numbers, generation=1, **fields):
    return [Facts(CommitId(generation, number), time=float(number), **fields) for number in numbers]


def kept(commits, now=NOW, **rules):
    gone = expired(commits, Keep(**rules), now)
    return [
        facts.commit.commit
        for facts in sorted(commits, key=lambda facts: facts.commit)
        if facts.commit not in gone
    ]


def measured(*values):
    return [Facts(CommitId(1, number), 0.0, value) for number, value in enumerate(values)]


# -- each rule -----------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_the_rest_expires_oldest_first():
    commits = [*run(3, 1, 2), *run(4, generation=2)]
    ids = [CommitId(1, 1), CommitId(1, 2), CommitId(1, 3), CommitId(2, 4)]
    for newest in range(1, 6):
        assert expired(commits, Keep(last=newest), NOW) == ids[: max(0, 4 - newest)]
    assert expired([], Keep(last=1), NOW) == []


def test_commits_that_a_job_has_passed_over_stay_and_do_not_count_until_it_has_got_beyond_them():
    passed_over = run(120, 140, 160, 180)  # continued from 120
    assert kept([*passed_over, *run(150, generation=2)], last=1) == [160, 180, 150]
    assert kept([*passed_over, *run(150, 160, generation=2)], last=2) == [180, 150, 160]
    assert kept([*passed_over, *run(150, 170, 190, generation=2)], last=2) == [170, 190]


def test_of_each_run_of_commit_numbers_the_first_durable_one_is_kept():
    commits = run(0, 5, 99, 103, 104, 250, 299, 500, 501, 502)
    assert kept(commits, last=1, period=100) == [0, 103, 250, 500, 502]
    assert kept(commits, last=1, period=1) == [0, 5, 99, 103, 104, 250, 299, 500, 501, 502]


def test_the_young_ones_are_kept():
    commits = run(100, 900, 939, 941, 990)
    assert kept(commits, last=1, within=60.0) == [941, 990]
    assert kept(commits, last=1, within=61) == [941, 990]
    assert kept(commits, last=1, within=61.5) == [939, 941, 990]


def test_the_best_are_kept():
    commits = measured(5.0, 3.0, 4.0, 1.0, 2.0, 9.0)
    assert kept(commits, last=1, best=Best("loss")) == [3, 5]
    assert kept(commits, last=1, best=Best("loss", count=3)) == [1, 3, 4, 5]
    assert kept(commits, last=1, best=Best("accuracy", mode="max", count=2)) == [0, 5]
    assert kept(commits, last=1, best=Best("loss", count=99)) == [0, 1, 2, 3, 4, 5]
    commits = measured(3.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    assert kept(commits, last=1, best=Best("loss", count=2)) == [1, 4, 6]


# -- the number ----------------------------------------------------------------------------------------


def manifest(attributes):
    state = {"attributes": attributes} if attributes is not None else {}
    return Manifest(1, 1, 0.0, {}, 1, {}, (), state)


@pytest.mark.parametrize(
    ("value", "metric"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        (np.float32(np.nan), None),
        (2**2000, None),
    ],
)
def test_the_number_is_read_from_the_state(value, metric):
    assert metric_of(manifest({"loss": encode(value, "")}), Best("loss")) == metric


@pytest.mark.parametrize("value", [True, "0.5", [0.5], {"a": 1}, 1 + 2j, np.zeros(1), np.complex64(1)])
def test_what_is_no_number_is_said(value):
    with pytest.raises(ValueError, match=r"^state\.loss .*float\(\)"):
        metric_of(manifest({"loss": encode(value, "")}), Best("loss"))
