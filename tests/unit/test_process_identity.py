"""The ends of processes: known of those of this very host, and never guessed."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from hvdrecover import process_identity
from hvdrecover.process_identity import has_ended, identity


def test_a_process_has_ended_when_it_has():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    said = identity(child.pid)
    assert not has_ended(said)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its exit code yet
    assert has_ended(said)
    child.communicate()
    assert has_ended(said)


def test_a_process_that_cannot_be_seen_has_not_ended(monkeypatch):
    """As other users' processes where /proc is mounted with hidepid."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    said = identity(child.pid)

    def hidden(number):
        raise FileNotFoundError(f"/proc/{number}/stat")

    monkeypatch.setattr(process_identity, "_seen", hidden)
    assert not has_ended(said)
    child.communicate()
    assert has_ended(said)


def test_this_process_lives():
    assert identity() != ""
    assert not has_ended(identity())


def test_a_child_is_another_process():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(identity) != identity()


def test_a_number_that_another_process_has_by_now_is_another_process():
    place, _, start = identity().rpartition(" ")
    assert has_ended(f"{place} {int(start) - 1}")


@pytest.mark.parametrize("number", range(3))
def test_nothing_is_known_of_other_hosts_boots_and_containers(number):
    words = identity(os.getpid()).split()
    words[number] = {0: "host-b", 1: "0-0", 2: "pid:[1]"}[number]
    words[3] = str(1 << 40)  # there is none
    assert not has_ended(" ".join(words))


@pytest.mark.parametrize("said", ["", "x", "] ", "] 1", " 1 1", "a b pid:[1] x y", "\0"])
def test_nothing_is_known_of_nonsense(said):
    assert not has_ended(said)
