"""Answers of nvidia-smi and the kernel's log. No GPU is needed: a script answers like that program."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.doctor import gpus
from hvdrecover.errors import DiscoveryError

LOG = """\
6,1000,5000000,-;usb 1-1: new device
 SUBSYSTEM=usb
4,1001,3600000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1896, GPU has fallen off the bus.
4,1002,7200000000,-;NVRM: Xid (PCI:0000:10:1c): 13, pid=42, Graphics Exception
"""
WELL = {
    "index": "0",
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "retired_pages.pending": "[N/A]",
    "clocks_event_reasons.active": "0x0000000000000004",
}

# A driver that calls the reasons of clocks by their older name, and says so as each of its versions does.
PROGRAM = """\
#!/bin/sh
case "$1" in
*event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.' {to}; exit 2;;
--query-gpu=index,name,*,clocks_throttle_reasons.active) ;;
*) echo "asked: $1"; exit 2;;
esac
echo '0, NVIDIA A100-SXM4-40GB, 535.104, 31, 40960, 3, 0, No, No, [N/A], 0x0000000000000000'
echo '1, NVIDIA A100-SXM4-40GB, 535.104, 91, 40960, 3, 2, No, No, [N/A], 0x0000000000000048'
"""


def answers(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi on the path."""
    program = folder / "nvidia-smi"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("to", ["", ">&2"])
def test_what_a_driver_does_not_know_is_not_asked_again(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(tmp_path, PROGRAM.format(to=to), monkeypatch)
    (tmp_path / "kmsg").write_text(LOG)
    found = gpus.look(tmp_path / "kmsg")
    assert found is not None
    assert found["problem"] == ""
    assert [gpu["temperature.gpu"] for gpu in found["gpus"]] == ["31", "91"]
    failing, suffering = gpus.judge({"h1": found})
    assert failing.at_fault == ("h1",)
    assert failing.what == "h1: GPU 1 has had 2 memory errors that could not be corrected"
    assert suffering.what.startswith("h1: GPU 1 is slowed by the hardware, as it is hot, Xid 79")


def test_a_driver_that_does_not_answer_is_a_failure_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost."
    answers(tmp_path, f"#!/bin/sh\necho '{lost}'; exit 15\n", monkeypatch)
    (failing,) = gpus.judge({"h1": gpus.look(tmp_path / "none"), "h2": None})
    assert (failing.outcome, failing.at_fault) == ("failure", ("h1",))
    assert failing.what == f"h1: nvidia-smi: {lost}"


def test_a_host_without_gpus_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    if gpus.facts.gpus():
        pytest.skip("this host has GPUs")
    assert gpus.look() is None
    assert [each.outcome for each in gpus.judge({"h1": None})] == ["skipped"]


def test_the_log_tells_of_errors_and_how_long_ago_they_were() -> None:
    lost, program = gpus.xids(LOG, now=7200.0)
    assert lost == {
        "gpu": "0000:3b:00",
        "xid": 79,
        "text": "pid=1896, GPU has fallen off the bus.",
        "age": 3600.0,
    }
    assert program["xid"] == 13


def test_a_log_that_can_not_be_read_is_not_the_same_as_one_without_errors(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text("6,1,1,-;nothing\n")
    assert gpus._xids(tmp_path / "kmsg") == []
    assert gpus._xids(tmp_path / "none") is None
    (well,) = gpus.judge({"h1": host(), "h2": {**host(), "xids": None}})
    assert well.outcome == "ok"
    what = "2 x NVIDIA H100 80GB HBM3: no memory errors, no slowed clocks"
    assert well.what == f"{what}; the kernel's log can't be read on h2"


def host(**fields: str) -> dict[str, Any]:
    return {"gpus": [{**WELL, **fields}], "problem": "", "xids": []}


@pytest.mark.parametrize(
    ("fields", "outcome", "words"),
    [
        ({"ecc.errors.uncorrected.volatile.total": "7"}, "failure", "GPU 0 has had 7 memory errors"),
        ({"remapped_rows.failure": "Yes"}, "failure", "no memory left to replace"),
        ({"remapped_rows.pending": "Yes"}, "warning", "at its next reset"),
        ({"retired_pages.pending": "Yes"}, "warning", "at its next reset"),
        ({"clocks_event_reasons.active": "0x80"}, "warning", "slowed by the power supply"),
        ({"clocks_event_reasons.active": "0x20"}, "warning", "slowed by the driver, as it is hot"),
        ({"clocks_event_reasons.active": "0x8"}, "warning", "GPU 0 is slowed by the hardware"),
        ({"memory.used": "40000"}, "warning", "40000 of 81559 MiB in use"),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]"}, "ok", "1 x NVIDIA H100"),
    ],
)
def test_what_is_wrong_with_a_gpu(fields: dict[str, str], outcome: str, words: str) -> None:
    (found,) = gpus.judge({"h1": host(**fields)})
    assert (found.outcome, found.at_fault) == (outcome, ("h1",) if outcome == "failure" else ())
    assert words in found.what


def test_errors_of_the_hardware_are_warned_of_and_those_of_programs_are_not() -> None:
    (found,) = gpus.judge({"h1": {**host(), "xids": list(gpus.xids(LOG, now=7200.0))}})
    assert found.outcome == "warning"
    assert found.what == "h1: Xid 79 of 0000:3b:00 1.0 h ago: pid=1896, GPU has fallen off the bus."


@pytest.mark.parametrize("told", ["", "No devices were found", "0, H100, too, many, fields"])
def test_an_answer_that_is_no_table(told: str) -> None:
    with pytest.raises(DiscoveryError, match="nvidia-smi"):
        gpus.parsed(told, ["index", "name"])
