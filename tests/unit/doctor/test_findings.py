from __future__ import annotations

from collections.abc import Iterator

import pytest

from hvdrecover.doctor.findings import Finding, checked, has_failed, ok, refused, warning
from hvdrecover.errors import ConfigError, LaunchError


@pytest.mark.parametrize(
    ("outcome", "remedy"), [("failure", ""), ("warning", ""), ("ok", "rest"), ("skipped", "rest")]
)
def test_what_is_wrong_has_a_remedy_and_nothing_else_has(outcome: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"^network: "):
        Finding("network", outcome, "it is so", remedy)  # type: ignore[arg-type]


def test_what_a_check_finds() -> None:
    assert checked("clocks", lambda: ok("clocks", "right")) == [ok("clocks", "right")]
    assert checked("clocks", lambda: iter([ok("a", "1"), ok("b", "2")])) == [ok("a", "1"), ok("b", "2")]


def test_a_check_that_crashes_is_a_failure_of_that_check_and_keeps_what_it_had_found() -> None:
    def look() -> Iterator[Finding]:
        yield ok("root", "opened")
        raise ZeroDivisionError("division by zero")

    first, second = checked("root", look)
    assert first == ok("root", "opened")
    assert (second.check, second.outcome) == ("root", "failure")
    assert second.what == "the check itself has failed: ZeroDivisionError: division by zero"
    assert second.remedy


def test_an_error_of_ours_is_told_as_it_is() -> None:
    def look() -> Finding:
        raise ConfigError("-np", "too many")

    (found,) = checked("ranks", look)
    assert (found.outcome, found.what) == ("failure", "-np: too many")


def test_an_interrupt_is_none_of_a_checks_business() -> None:
    def look() -> Finding:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked("ranks", look)


def test_a_messages_last_sentence_is_its_remedy() -> None:
    told = refused("root", LaunchError("h1", "s3://b: no such bucket. Check the path."), "Do something.")
    assert (told.what, told.remedy) == ("h1: s3://b: no such bucket", "Check the path.")
    bare = refused("root", LaunchError("h1", "install s3fs v0. too"), "Do something.")
    assert (bare.what, bare.remedy) == ("h1: install s3fs v0. too", "Do something.")


def test_only_failures_fail() -> None:
    well = [ok("a", "1"), warning("b", "2", "look"), Finding("c", "skipped", "3")]
    assert not has_failed(well)
    assert has_failed([*well, Finding("d", "failure", "4", "mend")])
