"""The choice of what to copy from."""

from __future__ import annotations

from dataclasses import replace

from hvdrecover.checkpoint.storage.uploads import LONGEST_LINE, Part, Place, Uploaded, Uploads


def file(commit: int, *digests: str, copies: int = 0, name: str = "model") -> Uploaded:
    parts = tuple(Part(digest, f"tag of {digest}") for digest in digests)
    return Uploaded(Place("bucket", f"run/{commit}/{name}"), f"tag of {commit}", 10, parts, copies)


def noted(*files: Uploaded) -> Uploads:
    uploads = Uploads()
    for each in files:
        uploads.add(each)
    return uploads


def source(uploads: Uploads, commit: int, name: str = "model") -> Uploaded | None:
    return uploads.source(file(commit, name=name).place)


def test_the_file_before_the_last_one_is_copied_from() -> None:
    assert source(noted(), 1) is None
    assert source(noted(file(1)), 2) is None
    assert source(noted(file(1), file(2)), 3) == file(1)
    assert source(noted(file(1), file(2), file(3)), 4) == file(2)


def test_names_have_files_of_their_own() -> None:
    uploads = noted(file(1), file(1, name="optimizer"), file(2))
    assert source(uploads, 3) == file(1)
    assert source(uploads, 3, "optimizer") is None


def test_what_is_gone_is_forgotten_and_nothing_else() -> None:
    uploads = noted(file(1), file(2))
    uploads.forget(file(1))
    assert source(uploads, 3) is None
    uploads.forget(file(7))
    uploads.add(file(3))
    assert source(uploads, 4) == file(2)


def test_what_is_written_again_is_no_source_for_itself_and_is_there_once() -> None:
    uploads = noted(file(1), file(2))
    assert source(uploads, 2) is None
    uploads.add(again := replace(file(2), tag="another"))
    assert source(uploads, 3) == file(1)
    uploads.add(file(3))
    assert source(uploads, 4) == again


def test_a_line_of_copies_has_an_end() -> None:
    assert source(noted(file(1, copies=LONGEST_LINE - 1), file(2)), 3) is not None
    assert source(noted(file(1, copies=LONGEST_LINE), file(2)), 3) is None


def test_parts_are_the_same_by_place_digest_and_size() -> None:
    found = file(1, "a", "b")
    assert found.same(1, "b", 10) == Part("b", "tag of b")
    assert found.same(0, "b", 10) is None
    assert found.same(2, "b", 10) is None
    assert found.same(1, "b", 11) is None
