"""Commit identities, settings and policies: pure values and functions."""

import math

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Best, Checkpoint, Keep
from hvdrecover.checkpoint.storage.interface import pause_before
from hvdrecover.errors import ConfigError
from hvdrecover.state.durable import is_due


@pytest.mark.parametrize(
    ("commit", "name"),
    [
        (CommitId(3, 120), "g0003-c00000120"),
        (CommitId(0, 0), "g0000-c00000000"),
        (CommitId(12345, 1234567890), "g12345-c1234567890"),
    ],
)
def test_a_commit_and_its_folder(commit, name):
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
    assert is_due(every_commits, every_seconds, commits_since, seconds_since) is due


def test_retries_wait_twice_as_long_each_time_up_to_a_cap():
    for attempt, most in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0], 1):
        assert most / 2 <= pause_before(attempt) <= most


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("checkpoint", lambda: Checkpoint("")),
        ("checkpoint", lambda: Checkpoint(None)),
        ("checkpoint", lambda: Checkpoint(b"/data")),
        ("every_commits", lambda: Checkpoint("/data", every_commits=0)),
        ("every_commits", lambda: Checkpoint("/data", every_commits=True)),
        ("every_seconds", lambda: Checkpoint("/data", every_seconds=0)),
        ("every_seconds", lambda: Checkpoint("/data", every_seconds=math.nan)),
        ("every_seconds", lambda: Checkpoint("/data", every_seconds="60")),
        ("keep", lambda: Checkpoint("/data", keep=0)),
        ("keep", lambda: Checkpoint("/data", keep=True)),
        ("keep", lambda: Checkpoint("/data", keep={"newest": 3})),
        ("near", lambda: Checkpoint("/data", near=" ")),
        ("strict", lambda: Checkpoint("/data", strict="no")),
        ("interval", lambda: Checkpoint("/data", interval="always")),
        ("interval", lambda: Checkpoint("/data", interval="auto", every_commits=10)),
        ("interval", lambda: Checkpoint("/data", interval="auto", every_seconds=60.0)),
        ("keep.last", lambda: Keep(last=0)),
        ("keep.last", lambda: Keep(last=True)),
        ("keep.period", lambda: Keep(period=0)),
        ("keep.within", lambda: Keep(within=0)),
        ("keep.within", lambda: Keep(within=math.nan)),
        ("keep.within", lambda: Keep(within="1h")),
        ("keep.best", lambda: Keep(best="val_loss")),
        ("best.metric", lambda: Best("state.val_loss")),
        ("best.mode", lambda: Best("loss", mode="least")),
        ("best.count", lambda: Best("loss", count=0)),
        ("best.count", lambda: Best("loss", count=True)),
    ],
)
def test_a_setting_that_cannot_be_is_named(name, make):
    with pytest.raises(ConfigError, match=rf"^{name}: ") as caught:
        make()
    assert caught.value.name == name
