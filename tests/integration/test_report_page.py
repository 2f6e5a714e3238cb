"""The page of a run in a real browser: on a phone, in the dark, on paper, for those who can't see it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.cli import main
from tests.integration.browser import CHROMIUM, CUT, PHONE, Browser, browser
from tests.unit.reporting.runs import Ranks, Run, example

PAPER = 690  # CSS pixels between the margins of A4
HOSTILE = (
    "</title><script>console.error(1)</script><img src=http://127.0.0.1:9/ onerror=console.error(2)>'\"&"
)

BOXES = """
(style) => Array.from(document.querySelectorAll(".plot > svg " + style), (shape) => {
    const box = shape.getBoundingClientRect();
    return {left: box.left, right: box.right, top: box.top, bottom: box.bottom,
            title: shape.querySelector("title") ? shape.querySelector("title").textContent : ""};
})
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    if CHROMIUM is None:
        message = "there is no browser to look with; on Debian and Ubuntu: apt-get install chromium"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = example(folder / "events")
    run.report(50, "durable", pid=10, generation=2, commit=4, bytes=2_000_000, seconds=0.5)
    return report(folder / "events", folder / "page.html")


def report(events: Path, page: Path) -> Path:
    assert main(["report", str(events), "--html", str(page)]) == 0
    return page


def boxes(tab: Browser, style: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tab.value(f"({BOXES})({json.dumps(style)})")
    return found


def test_the_faults_times_and_versions_are_on_the_page(tab: Browser, page: Path) -> None:
    tab.open(page, 1100)
    shown = tab.value("document.body.innerText")
    for expected in ("66.5%", "22.7 s", "killed by SIGKILL", "load_batch (train.py:31)", "finished"):
        assert expected in shown
    assert "2.0 MB in 0.50 s, 0.50 s a commit" in shown
    assert "Linux x86_64, 2 processors" in shown and "torch 2.13.0" in shown


def test_the_time_line_has_each_ranks_activities_its_faults_and_commits(tab: Browser, page: Path) -> None:
    tab.open(page, 1100)
    crash, hang = sorted(boxes(tab, "path.fault"), key=lambda box: box["left"])
    assert "crash of rank 1 on node-2" in crash["title"] and "hang of rank 0 on node-1" in hang["title"]
    recoveries = sorted(boxes(tab, "rect.recovery"), key=lambda box: (box["top"], box["left"]))
    assert len(recoveries) == 4  # of two ranks
    assert all("rendezvous " in each["title"] for each in recoveries)
    assert recoveries[0]["left"] == pytest.approx((crash["left"] + crash["right"]) / 2, abs=2.0)
    assert recoveries[0]["top"] < crash["top"] and "rank 0 on " in recoveries[0]["title"]
    commits, (durable,) = boxes(tab, "line.commit"), boxes(tab, "line.durable")
    assert len(commits) == 6
    length = durable["bottom"] - durable["top"]
    assert all(tick["bottom"] - tick["top"] < length for tick in commits)


def one_event(folder: Path) -> None:
    Run(folder).fault(1, rank=-1, detail="exit code 1")


def many_ranks(folder: Path) -> None:
    """With more faults than have room for their names."""
    run = Run(folder)
    ranks: Ranks = {rank: (f"node-{rank // 8}.cluster.example.org", 100 + rank) for rank in range(64)}
    run.report(0, "start", pid=5, attempt=1, command=["python"])
    run.rendezvous(4, ranks, 1, 0, "initial")
    for generation in range(1, 30):
        time = 100 * generation
        run.commit(ranks, generation, {4 * generation + each: time - 40 + 10 * each for each in range(4)})
        host = ranks[generation][0]
        run.fault(time, "out_of_memory", host, generation, commit=[generation, 4 * generation + 3])
        run.rendezvous(time + 5, ranks, generation + 1, 4 * generation + 3)
        run.step(time + 6, ranks, generation + 1, 4 * generation + 3)


def hostile(folder: Path) -> None:
    run = Run(folder)
    ranks: Ranks = {0: (f"{HOSTILE[8:36]}\u202e".replace("/", ""), 10)}
    run.report(0, "start", HOSTILE[:7].strip("</"), pid=5, attempt=1, command=["python"])
    run.rendezvous(4, ranks, 1, 0, "initial")
    run.commit(ranks, 1, {1: 9, 2: 14})
    run.fault(20, HOSTILE, detail=f"{HOSTILE}\x00\ud800")
    run.report(30, "gave_up", pid=5, scope="job", reason=HOSTILE)
    run.report(31, "end", pid=5, code=3, reason=HOSTILE)


@pytest.mark.parametrize("write", [example, one_event, many_ranks, hostile])
def test_any_run_fits_screens_and_paper_and_loads_nothing(tab: Browser, tmp_path: Path, write: Any) -> None:
    write(tmp_path / "events")
    page = report(tmp_path / "events", tmp_path / "page.html")
    for width, media in ((320, ""), (PHONE, ""), (768, ""), (1100, ""), (PAPER, "print")):
        tab.open(page, width, media=media)
        assert tab.value("document.documentElement.scrollWidth") <= width
        assert tab.value(CUT) == []
    assert tab.printed().startswith(b"%PDF-")
    asked = [event["request"]["url"] for event in tab.told("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert tab.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []


def test_what_events_say_is_text_and_nothing_else(tab: Browser, tmp_path: Path) -> None:
    hostile(tmp_path / "events")
    tab.open(report(tmp_path / "events", tmp_path / "page.html"), 1100)
    assert tab.value("document.querySelectorAll('script, img, iframe, object, a').length") == 0
    detail = tab.value("document.querySelector('tr.detail td').textContent")
    assert detail == HOSTILE + r"\x00\ud800"
    assert HOSTILE in tab.value("document.querySelector('path.fault title').textContent")
    assert r"\u202e" in tab.value("document.body.textContent")
