"""Commit identities, settings, and which commits are due or deleted: pure values and functions."""

import math

import numpy as np
import pytest

from hvdrecover.checkpoint import Best, Checkpoint, CommitId, Keep
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.retention import Facts, expired, metric_of
from hvdrecover.checkpoint.storage import pause_before
from hvdrecover.checkpoint.values import encode
from hvdrecover.errors import ConfigError
from hvdrecover.state.durable import is_due


def test_a_commit_and_its_folder():
    for commit, name in [
        (CommitId(3, 120), "g0003-c00000120"),
        (CommitId(12345, 1234567890), "g12345-c1234567890"),
    ]:
        assert (commit.name, str(commit), CommitId.parse(name)) == (name, name, commit)


@pytest.mark.parametrize(
    ("every_commits", "every_seconds", "commits_since", "seconds_since", "due"),
    [
        (None, None, 1, 0.0, True),
        (10, None, 9, math.inf, False),
        (10, None, 10, 0.0, True),
        (1, None, 1, 0.0, True),
        (None, 60.0, 1000, 59.9, False),
        (None, 60.0, 1, 60.0, True),
        (10, 60.0, 9, 59.9, False),
        (10, 60.0, 10, 0.0, True),
        (10, 60.0, 1, 61.0, True),
    ],
)
def test_when_a_commit_is_due(every_commits, every_seconds, commits_since, seconds_since, due):
    settings = Checkpoint("root", every_commits=every_commits, every_seconds=every_seconds)
    assert is_due(settings, commits_since, seconds_since) is due


def test_retries_wait_twice_as_long_each_time_up_to_a_cap():
    for attempt, most in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], 1):
        assert most / 2 <= pause_before(attempt) <= most


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("checkpoint", lambda: Checkpoint("")),
        ("checkpoint", lambda: Checkpoint(None)),
        ("every_commits", lambda: Checkpoint("/data", every_commits=0)),
        ("every_commits", lambda: Checkpoint("/data", every_commits=True)),
        ("every_seconds", lambda: Checkpoint("/data", every_seconds=0)),
        ("every_seconds", lambda: Checkpoint("/data", every_seconds=math.nan)),
        ("every_seconds", lambda: Checkpoint("/data", every_seconds="60")),
        ("keep", lambda: Checkpoint("/data", keep=0)),
        ("keep", lambda: Checkpoint("/data", keep={"newest": 3})),
        ("near", lambda: Checkpoint("/data", near=" ")),
        ("strict", lambda: Checkpoint("/data", strict="no")),
        ("keep.last", lambda: Keep(last=0)),
        ("keep.period", lambda: Keep(period=0)),
        ("keep.within", lambda: Keep(within=0)),
        ("keep.best", lambda: Keep(best="val_loss")),
        ("best.metric", lambda: Best("state.val_loss")),
        ("best.mode", lambda: Best("loss", mode="least")),
        ("best.count", lambda: Best("loss", count=0)),
    ],
)
def test_a_setting_that_cannot_be_is_named(name, make):
    with pytest.raises(ConfigError, match=rf"^{name}: ") as caught:
        make()
    assert caught.value.name == name


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


def manifest(value):
    return Manifest(1, 1, 0.0, {}, 1, {}, (), {"attributes": {"loss": encode(value, "")}})


@pytest.mark.parametrize(
    ("value", "metric"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (None, None),
        (math.nan, None),
        (math.inf, None),
        (np.float32(np.nan), None),
        (2**2000, None),
    ],
)
def test_the_number_is_read_from_the_state(value, metric):
    assert metric_of(manifest(value), Best("loss")) == metric


@pytest.mark.parametrize("value", [True, "0.5", [0.5], {"a": 1}, 1 + 2j, np.zeros(1), np.complex64(1)])
def test_what_is_no_number_is_said(value):
    with pytest.raises(ValueError, match=r"^state\.loss .*float\(\)"):
        metric_of(manifest(value), Best("loss"))
