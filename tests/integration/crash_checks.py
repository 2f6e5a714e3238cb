"""The properties that a checkpoint root must have after any crash."""

from __future__ import annotations

from pathlib import Path

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.reader import load_newest
from tests.integration.crash_writer import KEEP, make_commit, open_store
from tests.unit.checkpoint.roots import Recorder, assert_is


def check_opens(root: Path, acknowledged: CommitId | None) -> CommitId | None:
    """The root opens, and the newest acknowledged commit or a later complete one is there bit for bit.

    Returns:
        The commit that was found.
    """
    events = Recorder()
    found = load_newest(open_store(root, events))
    if acknowledged is not None:
        assert found is not None, f"{acknowledged} was acknowledged, and nothing is there"
        assert found.id >= acknowledged, f"{acknowledged} was acknowledged, and {found.id} is the newest"
    if found is not None:
        assert_is(found, make_commit(found.id, found.state["attributes"]["nbytes"]))
    for skipped in events.of("skipped"):
        # A crash leaves commits that were never completed, and no broken ones.
        assert "never completed" in skipped["reason"], skipped
    return None if found is None else found.id


def check_start(root: Path, acknowledged: CommitId | None) -> None:
    """A later start continues, and collects what was left behind; only the newest commits are then there."""
    newest = check_opens(root, acknowledged)
    store = open_store(root, Recorder())
    claimed = [int(claim.stem.removeprefix("g")) for claim in root.glob("claims/g*.json")]
    generation = store.claim_next()
    assert generation > max(claimed, default=0)
    first = 0 if newest is None else newest.commit
    written = [CommitId(generation, first + 1), CommitId(generation, first + 2)]
    for commit in written:
        store.write(make_commit(commit), rank=0)
        for folder in _commit_folders(root):
            assert (folder / FILE_NAME).is_file(), f"{folder.name} was left behind half-written"
    assert len(written) == KEEP
    assert [folder.name for folder in _commit_folders(root)] == [commit.name for commit in written]
    for path in root.rglob("*"):
        assert not path.name.startswith("."), f"{path} was left behind"
    assert check_opens(root, written[-1]) == written[-1]


def _commit_folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if CommitId.parse(path.name))
