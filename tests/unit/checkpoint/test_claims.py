"""Of all that claim one root, at any time and in any order, the job that was started last continues."""

import itertools
import json

import pytest

from hvdrecover.checkpoint.claims import Claims
from hvdrecover.errors import FencedError, FormatVersionError, OvertakenError, StorageError
from tests.fakes.clock import FakeClock
from tests.fakes.root import FakeRoot, FakeStorage
from tests.unit.checkpoint.roots import Wrapped, content, make_snapshot, make_store


def claims_at(storage, job, host="host"):
    return Claims(storage, job=job, host=host, clock=FakeClock(start=1_000.0))


def test_the_error_names_the_job_that_has_replaced_this_one(root):
    old, new = claims_at(root, "old"), claims_at(root, "3f2a91c4b7", host="host-b")
    old.take_after(0)
    new.take_after(0)
    new.take(3)
    with pytest.raises(FencedError) as caught:
        old.check(1)
    fields = json.loads(root.read("claims/g0003.json"))
    assert caught.value.by == f"job 3f2a91c4 on host-b (process {fields['pid']})"
    assert caught.value.by in str(caught.value)


def test_a_later_rendezvous_of_the_same_job_replaces_no_job(root):
    left_behind, rank_0 = claims_at(root, "job"), claims_at(root, "job")
    left_behind.take_after(0)
    rank_0.take(2)
    with pytest.raises(OvertakenError, match="generation 2 ") as caught:
        left_behind.check(1)
    assert caught.value.by == ""


OLD = {"job": "old", "host": "h", "pid": 5, "time": 7.0, "acknowledged": True}


def test_claims_of_earlier_versions_count_as_before(root):
    root.publish("claims/g0003.json", json.dumps(OLD).encode())
    claims = claims_at(root, "new")
    assert claims.read(3).acknowledged
    assert claims.take_after(0) == 4
    root.publish("claims/g0009.json", json.dumps(OLD).encode())
    with pytest.raises(FencedError, match=r"job old on h \(process 5\)"):
        claims.check(4)


def test_a_claim_of_an_unknown_format_stops_the_job_and_is_left_as_it_is(root):
    claims = claims_at(root, "old")
    claims.take_after(0)
    assert json.loads(root.read("claims/g0001.json"))["format"] == 1
    root.publish("claims/g0002.json", text := b'{"format": 2, "owner": {"job": "new"}}')
    for look in (lambda: claims.check(1), lambda: claims_at(root, "next").take_after(0)):
        with pytest.raises(FormatVersionError, match=r"claims/g0002\.json: .*format 2.*pip install"):
            look()
    assert root.read("claims/g0002.json") == text
    root.publish("claims/g0002.json", json.dumps({**OLD, "format": 1, "later": "field"}).encode())
    assert claims.read(2).job == OLD["job"]


def test_a_start_of_a_job_that_was_replaced_is_refused_and_touches_nothing(root):
    old, new = make_store(root, job="old"), make_store(root, job="new")
    old.claim_next()
    old.write(make_snapshot(1, 1), rank=0)
    new.claim_next()
    root.publish("g0001-c00000002/model.safetensors", b"left over")
    root.publish("g0002-c00000002/model.safetensors", b"under way")
    before = content(root)
    restarted = make_store(wrapped := Wrapped(root), job="old")
    for _ in range(2):
        with pytest.raises(FencedError, match="generation 2 ") as caught:
            restarted.claim_next()
        assert caught.value.by.startswith("job new on host")
    with pytest.raises(FencedError):
        restarted.write(make_snapshot(3, 3), rank=0)
    assert (content(root), wrapped.calls) == (before, [])


class Interrupted:
    """A storage whose process is stopped before one of its calls, while another process runs to its end."""

    def __init__(self, storage, at, other):
        self._storage, self._left, self._other = storage, at, other
        self.other_has_run = False

    def __getattr__(self, name):
        call = getattr(self._storage, name)

        def interrupted(*args):
            self._left -= 1
            if self._left == -1:
                self.let_the_other_run()
            return call(*args)

        return interrupted if callable(call) else call

    def let_the_other_run(self):
        if not self.other_has_run:
            self.other_has_run = True
            self._other()


@pytest.mark.parametrize("interrupted", ["recovery", "start"])
@pytest.mark.parametrize(("old_job", "new_job"), [("old", "new"), ("job/1", "job/2")])
def test_a_start_overtakes_a_recovery_wherever_one_interrupts_the_other(old_job, new_job, interrupted):
    """The old start is at generation 10 in memory and has claimed 3; the new one finds 3, and claims 4."""
    generations = set()
    for at in itertools.count():
        storage, outcome = FakeStorage("fake://root", FakeRoot(), None), {}
        claims_at(storage, old_job).take_after(2)

        def recovery(seen, storage=storage, outcome=outcome):
            try:
                claims = claims_at(seen, old_job)
                claims.take(10)
                claims.check(10)
                storage.publish("by the old job", b"")
                outcome["old"] = 10
            except FencedError as error:
                outcome["old"] = error

        def start(seen, outcome=outcome):
            outcome["new"] = claims_at(seen, new_job).take_after(0)

        first, second = (recovery, start) if interrupted == "recovery" else (start, recovery)
        seen = Interrupted(storage, at, lambda second=second, storage=storage: second(storage))
        first(seen)
        was_interrupted = seen.other_has_run
        seen.let_the_other_run()
        generations.add(outcome["new"])
        claims_at(storage, new_job).check(outcome["new"])
        for next_process in (claims_at(storage, old_job), claims_at(storage, old_job)):
            with pytest.raises(FencedError):
                next_process.take(11)
        if old_job == "old":
            with pytest.raises(FencedError, match="job new on "):
                claims_at(storage, old_job).take_after(0)
        # What it may have published is older than all that the new one will publish.
        if storage.size("by the old job") is not None:
            assert (outcome["old"], outcome["new"]) == (10, 11)
        else:
            assert isinstance(outcome["old"], FencedError)
        # The new job continues, also to the numbers that the old one has claimed in vain.
        later = claims_at(storage, new_job)
        for generation in range(outcome["new"] + 1, outcome["new"] + 12):
            later.take(generation)
            later.check(generation)
        if not was_interrupted:  # it makes fewer calls
            break
    assert generations == {4, 11}


@pytest.mark.parametrize(("wrote", "left"), [(False, {"1": 1, "2": 2}), (True, {"2": 2})])
def test_a_job_that_took_the_root_and_made_nothing_durable_has_replaced_nobody(root, wrote, left):
    for generation, job in enumerate(["a/1", "b/2", "c/3"], 1):
        claims = claims_at(root, job)
        assert claims.take_after(0) == generation
        if job == "a/1" or (wrote and job == "b/2"):
            claims.acknowledge(generation)
    assert claims.unreplaced() == left


def test_a_claim_that_is_gone_since_the_claims_were_listed_replaces_no_job(root):
    """The root was unmounted just then. A `FencedError` would end the job, and no restart would follow."""
    with pytest.raises(StorageError, match=r"claims/g0001\.json is gone"):
        claims_at(root, "job").read(1)
