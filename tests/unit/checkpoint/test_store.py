import json

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.root import commits, is_complete, is_quarantined
from hvdrecover.errors import ForeignRootError, NoUsableCommitError, StorageError
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import Wrapped, assert_is, content, make_snapshot, make_store


def write_all(store, *snapshots):
    for snapshot in snapshots:
        store.write(snapshot, rank=0)


# -- claims --------------------------------------------------------------------------------------------


def test_a_claim_is_later_than_all_claims_and_commits(root):
    store = make_store(root)
    store.claim_next()
    store.claims.take(7)
    assert make_store(root).claim_next() == 8
    root.publish(f"g0030-c00000001/{FILE_NAME}", b"broken, but there")
    assert make_store(root).claim_next() == 31


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"{}", b"\xff", b'{"job": "x"}', b"[" * 100_000])
def test_a_damaged_claim_is_nobodys_and_may_have_had_commits(root, text):
    root.publish("claims/g0004.json", text)
    store = make_store(root)
    claim = store.claims.read(4)
    assert (claim.job, claim.acknowledged) == ("", True)
    assert store.claim_next() == 5


# -- whose root ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": b"text"},
        {"photos/1.jpg": b"jpg", "photos/2.jpg": b"jpg"},
        {"g1-c1/model.safetensors": b"almost ours"},
        {"claims/2024/insurance.pdf": b"not those claims"},
        {"claims/insurance.json": b"{}"},
        {"g0001-c00000001/model.safetensors": b"ours", "thesis.tex": b"but this is not"},
        {".hidden": b""},
    ],
)
def test_a_foreign_root_is_refused_and_left_byte_for_byte(root, files):
    for path, data in files.items():
        root.publish(path, data)
    wrapped = Wrapped(root)
    with pytest.raises(ForeignRootError, match=f"^{root.url}: ") as caught:
        make_store(wrapped).claim_next()
    assert any(path.split("/")[0] in str(caught.value) for path in files)
    assert content(root) == files
    assert wrapped.calls == []


# -- writing -------------------------------------------------------------------------------------------


def test_the_manifest_is_written_last_and_says_who_wrote_it(root):
    wrapped = Wrapped(root)
    store = make_store(wrapped, clock=FakeClock(start=7.5))
    store.claim_next()
    wrapped.calls.clear()
    store.write(make_snapshot(1, 5), rank=3)
    assert [call for call in wrapped.calls if "g0001-c00000005" in call][-3:] == [
        "write g0001-c00000005/model.safetensors",
        "write g0001-c00000005/optimizer.safetensors",
        f"publish g0001-c00000005/{FILE_NAME}",
    ]
    fields = json.loads(root.read(f"g0001-c00000005/{FILE_NAME}"))
    assert (fields["time"], fields["writer"]["rank"], fields["writer"]["host"]) == (7.5, 3, "host")
    assert fields["world_size"] == 2


def test_a_second_attempt_never_alters_files_under_a_manifest(root):
    wrapped = Wrapped(root)
    store = make_store(wrapped)
    store.claim_next()
    wrapped.plan = [None, None, None, None, StorageError("url", "acknowledging failed")]
    with pytest.raises(StorageError, match="acknowledging"):
        write_all(store, make_snapshot(1, 1))
    assert is_complete(store.storage, CommitId(1, 1))
    wrapped.calls.clear()
    write_all(store, make_snapshot(1, 1))
    verbs = [call for call in wrapped.calls if call.startswith(("remove", "write", "publish g"))]
    assert verbs[0] == f"remove g0001-c00000001/{FILE_NAME}"
    assert verbs[-1] == f"publish g0001-c00000001/{FILE_NAME}"
    assert_is(load_newest(make_store(root)), make_snapshot(1, 1))


# -- leftovers -----------------------------------------------------------------------------------------


def test_what_was_never_completed_is_collected_before_the_next_write_and_not_at_the_start(root):
    """All ranks wait for a start, and to delete gigabytes takes time."""
    write_all(make_store(root), make_snapshot(1, 1))
    root.publish("g0001-c00000002/model.safetensors", b"half")
    wrapped = Wrapped(root)
    store = make_store(wrapped)
    store.claim_next()
    assert wrapped.calls == ["create claims/g0002.json"]
    write_all(store, make_snapshot(2, 3))
    assert commits(store.storage) == [CommitId(2, 3), CommitId(1, 1)]
    calls = [call for call in wrapped.calls if call.startswith(("delete", "write"))]
    assert calls[0] == "delete g0001-c00000002"
    (leftover,) = store.events.of("leftover")
    assert leftover["commit"] == "g0001-c00000002"
    assert "never completed" in leftover["message"]


def test_a_commit_that_lost_only_its_manifest_is_quarantined_and_no_leftover(root):
    """The claim says that there were commits, and retention never deletes the newest one."""
    write_all(make_store(root), make_snapshot(1, 1), make_snapshot(1, 2))
    for commit in (1, 2):
        root.remove(f"g0001-c0000000{commit}/{FILE_NAME}")
    before = content(root)
    store = make_store(root)
    store.claim_next()
    assert before.items() <= content(root).items()
    assert is_quarantined(root, CommitId(1, 2))
    with pytest.raises(NoUsableCommitError) as caught:
        load_newest(store)
    assert list(caught.value.reasons) == ["generation 1"]
    assert {skipped["reason"] for skipped in store.events.of("skipped")} == {"its manifest is gone"}


# -- fencing -------------------------------------------------------------------------------------------


# -- being killed --------------------------------------------------------------------------------------
