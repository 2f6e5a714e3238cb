from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.drill import slo
from hvdrecover.drill.slo import Numbers
from hvdrecover.errors import ConfigError

FOUND = Numbers(
    stall_seconds=0.05, recovery_seconds=4.0, steps_lost=12, goodput=0.7, samples_lost=0, rank_local=3
)


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text("goodput = 0.5\nsamples_lost = 0\n")
    assert slo.load(tmp_path / "slo.toml") == Numbers(goodput=0.5, samples_lost=0)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("goodput = ", "Invalid value"),
        ("stall = 1", "'stall'; .* stall_seconds"),
        ("goodput = 'much'", "goodput .*'much'"),
        ("goodput = -1", "goodput .*-1"),
        ("goodput = nan", "goodput .*nan"),
        ("goodput = true", "goodput .*True"),
    ],
)
def test_a_file_that_asks_for_nonsense_is_an_error(text: str, fact: str, tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^--slo: '.*slo\.toml'.*{fact}"):
        slo.load(tmp_path / "slo.toml")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        slo.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("wanted", "missed"),
    [
        (Numbers(), set()),
        (FOUND, set()),
        (Numbers(stall_seconds=0.04), {"stall_seconds"}),
        (Numbers(recovery_seconds=3.9, steps_lost=11), {"recovery_seconds", "steps_lost"}),
        (Numbers(goodput=0.71), {"goodput"}),
        (Numbers(rank_local=2), {"rank_local"}),
        (Numbers(goodput=0.69, samples_lost=0), set()),
    ],
)
def test_what_is_missed_is_named(wanted: Numbers, missed: set[str]) -> None:
    assert set(slo.missed(wanted, FOUND)) == missed


def test_what_is_not_known_is_missed() -> None:
    assert slo.missed(Numbers(goodput=0.1), Numbers()) == {"goodput": "not known, and 0.1 is asked for"}
