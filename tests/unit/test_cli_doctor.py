"""``hvdrecover doctor``: arguments in, a table or JSON out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import cli
from hvdrecover.doctor import examination
from hvdrecover.doctor.examination import Finding, Settings

FINDINGS = [
    Finding("versions", "ok", "python 3.11.7"),
    Finding("names", "skipped", "this host only"),
    Finding("clocks", "warning", "h2 +3.0 s", "Set the clocks."),
    Finding("ssh", "failure", "h3: Connection \x1b[31mrefused", "Start an ssh server."),
    Finding("network", "failure", "none", "Mend it."),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings that were examined; `FINDINGS` are what is found."""
    noted: list[Settings] = []

    def examine(settings: Settings, **rest: Any) -> list[Finding]:
        noted.append(settings)
        return FINDINGS

    monkeypatch.setattr(examination, "examine", examine)
    monkeypatch.delenv("HVDRECOVER_CHECKPOINT", raising=False)
    monkeypatch.chdir(tmp_path)
    return noted


def test_all_options(asked: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", "file:///elsewhere")
    words = ["-H", "h1:4,h2:4", "-np", "6", "-p", "2222", "-i", "/key", "--network-interface", "eth0"]
    cli.main(["doctor", *words, "--checkpoint", "s3://b/run", "--state-size", "2.5G"])
    cli.main(["doctor"])
    assert asked[0] == Settings({"h1": 4, "h2": 4}, 6, ("eth0",), 2222, "/key", "s3://b/run", 2_500_000_000)
    assert asked[1].checkpoint == "file:///elsewhere"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--discover", "rack"], "rack"),
        (["--discover", "static h1:1", "-H", "h1:1"], "not allowed"),
        (["-H", "h1:1,h1:1"], "'h1' is named twice"),
        (["-H", "h1:1", "-np", "2"], "-np: 2 "),
        (["--hostfile", "missing"], "No such file"),
        (["--state-size", "big"], "argument --state-size: 'big' "),
    ],
)
def test_wrong_arguments_exit_with_2(
    asked: list[Settings], words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", *words])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
    assert asked == []


def test_a_machine_without_an_ssh_client_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["doctor", "-H", "h1.invalid:1"]) == 1
    assert re.search(
        "ssh +failure +h1.invalid: ssh .*No such file.*\n +→ .*openssh-client", capsys.readouterr().out
    )


def test_the_table_has_each_remedy_below_what_it_is_for(
    asked: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["check", "outcome"],
        ["versions", "ok"],
        ["names", "skipped"],
        ["clocks", "warning"],
    ]
    assert lines[4].strip() == "→ Set the clocks."
    assert "\x1b" not in lines[5] and "refused" in lines[5]
    assert lines[-2:] == ["", "failure: 2, warning: 1, ok: 1, skipped: 1"]
