"""The protocol by which ranks agree on a commit, message by message."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from hvdrecover import heartbeat
from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Arena, TensorSpec, plan
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.heartbeat import Page
from hvdrecover.state import rendezvous
from hvdrecover.state.durable import Standing
from hvdrecover.state.hooks import Agreement, Election
from hvdrecover.state.rendezvous import Published, elect, revive
from tests.fakes.world import FakeWorld, current_world
from tests.unit.state import jobs


def snapshot_of(*weights: float) -> Snapshot:
    arena = Arena(plan([TensorSpec("w", "F64", (len(weights),))]))
    arena.bytes_of("w").view(np.float64)[...] = weights
    state = {"attributes": {"model": {"w": {"$tensor": "w"}}, "epoch": 3}, "samplers": {}}
    return Snapshot(CommitId(2, 5), {"model": arena}, state, 4, {"fake": "1.0"}, finished=True)


NONE, C3, C4 = CommitId(0, 0), CommitId(2, 3), CommitId(2, 4)


def in_memory(*commits: CommitId) -> list[Published]:
    return [Published(commit, start=7) for commit in commits]


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (in_memory(NONE, NONE, NONE), Election(0, None)),
        (in_memory(CommitId(0, 7), NONE), Election(0, None)),
        (in_memory(NONE, CommitId(1, 0)), Election(1, CommitId(1, 0), (1,))),
        (in_memory(CommitId(1, 4), CommitId(1, 5), CommitId(1, 4)), Election(1, CommitId(1, 5), (1,))),
        (in_memory(C3, C3), Election(0, C3, (0, 1))),
        (in_memory(CommitId(1, 900), C3, NONE), Election(1, C3, (1,))),
        # As long as any rank has a memory, near commits of its start count as much.
        ([*in_memory(C3), Published(C3, True, 7)], Election(0, C3, (0,))),
        ([Published(C3, True, 7), *in_memory(C3)], Election(1, C3, (1,))),
        ([*in_memory(C3), Published(C4, True, 7)], Election(1, C4, (1,))),
        ([*in_memory(C3), Published(C4, True, 8)], Election(0, C3, (0,))),
        ([Published(NONE), *in_memory(C3), Published(C3, True, 7)], Election(1, C3, (1,))),
        # Where none has, the checkpoint root decides.
        ([Published(NONE), Published(C3, True, 7)], Election(0, None, revives=True)),
    ],
)
def test_the_newest_commit_wins_whoever_holds_it(published: list[Published], expected: Election) -> None:
    assert elect(published) == expected


@pytest.mark.parametrize(
    ("left", "durable", "expected"),
    [
        ([(None, ""), (C4, "a")], (C3, 2), 1),
        ([(C4, "a"), (C4, "a")], (C3, 2), 0),
        ([(C3, "a"), (None, "")], (C3, 2), 0),  # the same commit: near by is nearer
        ([(C3, "a"), (None, "")], (C4, 2), None),
        ([(C4, "a"), (None, "")], (None, 0), 0),
        ([(C4, "b"), (None, "")], (C3, 2), None),  # another job has taken the root since
        # Once it trains, each start counts its generations by itself: the later start goes first.
        ([(CommitId(9, 1), "a"), (CommitId(5, 4), "c")], (C3, 2), 1),
        ([(CommitId(9, 1), "a"), (None, "")], (CommitId(5, 2), 5), None),
        ([(C4, ""), (None, "")], (None, 0), None),
    ],
)
def test_a_near_commit_counts_if_nothing_newer_is_durable(
    left: list[tuple[CommitId | None, str]], durable: tuple[CommitId | None, int], expected: int | None
) -> None:
    assert revive(left, Standing({"a": 2, "c": 5}, *durable)) == expected


def test_all_ranks_learn_the_longest_silence_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    silences, seen = {0: 2.0, 1: 7.2504, 2: 0.0}, []

    class PageOfRank(Page):
        longest = property(lambda self: silences[current_world().rank()])

        def has_seen(self, seconds: float) -> None:
            seen.append(seconds)

    monkeypatch.setattr(heartbeat, "page", PageOfRank())
    jobs.on_ranks(3, lambda process: process.state(step=0).sync())
    assert seen == [7.251] * 3  # in whole milliseconds, rounded up


def receive_or_keep(
    held: dict[int, Snapshot], sent: Snapshot, left: Mapping[int, Snapshot] = MappingProxyType({})
) -> list[tuple[int, Agreement]]:
    """Rank 0 sends; return each rank's number of collectives, and its agreement.

    ``left``: by rank, the unsealed files of an earlier process.
    """

    def body(world: FakeWorld) -> tuple[int, Agreement]:
        agreement = Agreement(sent, "memory", "job")
        before = world.visits
        if world.rank() == 0:
            rendezvous.send(world, 0, agreement)
        else:
            mine = held.get(world.rank())
            files = ({}, {}) if mine is None else (mine.arenas, rendezvous.digests(mine))
            unsealed = left[world.rank()].arenas if world.rank() in left else {}
            agreement = rendezvous.receive(world, 0, *files, lambda layouts: unsealed)
        return world.visits - before, agreement

    return jobs.on_ranks(3, lambda process: body(process.world))


DESCRIPTION = 2  # collectives: header, who lacks the bytes


def test_ranks_that_hold_the_very_bytes_are_sent_no_more_than_a_description() -> None:
    held = {1: snapshot_of(1.5), 2: snapshot_of(1.5)}
    sent = dataclasses.replace(snapshot_of(1.5), id=CommitId(3, 5), state={"epoch": 4})
    found = receive_or_keep(held, sent)
    assert [visits for visits, _ in found] == [DESCRIPTION] * 3
    for rank in (1, 2):
        snapshot = found[rank][1].snapshot
        assert (snapshot.id, snapshot.state) == (CommitId(3, 5), {"epoch": 4})
        assert snapshot.arenas["model"] is held[rank].arenas["model"]


@pytest.mark.parametrize("other", [snapshot_of(2.5), snapshot_of(1.5, 1.5), None])
def test_a_rank_that_lacks_the_bytes_gets_them_while_another_keeps_its_own(other: Snapshot | None) -> None:
    keeps = snapshot_of(1.5)
    found = receive_or_keep({1: keeps} if other is None else {1: keeps, 2: other}, snapshot_of(1.5))
    assert [visits for visits, _ in found] == [DESCRIPTION + 1] * 3
    assert found[1][1].snapshot.arenas["model"] is keeps.arenas["model"]
    received = found[2][1].snapshot.arenas["model"]
    assert received.bytes_of("w").view(np.float64).tolist() == [1.5]
    assert other is None or received is not other.arenas["model"]
    assert keeps.arenas["model"].bytes_of("w").view(np.float64).tolist() == [1.5]


def test_of_files_that_an_earlier_process_left_only_the_pieces_that_differ_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "PIECE", 4096)
    weights = [float(number) for number in range(2000)]  # of 5 pieces
    for held, collectives in ({1: snapshot_of(*weights)}, 2), ({}, 5):  # rank 1 without files gets all pieces
        sent, left = snapshot_of(*weights), snapshot_of(*weights)
        left.arenas["model"].buffer[9000:9010] += 1
        found = receive_or_keep(held, sent, {2: left})
        assert [visits for visits, _ in found] == [DESCRIPTION + collectives] * 3
        received = found[2][1].snapshot
        assert received.arenas["model"] is left.arenas["model"]
        assert received.digests == rendezvous.digests(sent)
        for _, agreement in found:
            assert bytes(agreement.snapshot.arenas["model"].buffer) == bytes(sent.arenas["model"].buffer)


def test_a_large_snapshot_is_passed_on_in_the_same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PIECE", 1000)
    weights = [float(number) for number in range(2000)]
    found = receive_or_keep({1: snapshot_of(*weights)}, snapshot_of(*weights))
    assert found[2][1].snapshot.arenas["model"].bytes_of("w").view(np.float64).tolist() == weights
