"""The page of a run in a real browser: on a phone, in the dark, on paper, for those who can't see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.launch.processes import kill
from tests.integration.browser import CUT, PHONE, Browser
from tests.integration.faults import FaultyRun, wait_until_all_train
from tests.support.jobs import supervised
from tests.unit.reporting.runs import Ranks, Run

KILLED_AT = 8  # commits
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
# The least contrast of texts with the ground they stand on (WCAG 2.2: relative luminance and contrast ratio).
CONTRASTS = """
(() => {
    const channel = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const luminance = (colour) => {
        const [red, green, blue] = colour.match(/[\\d.]+/g).map((value) => channel(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const ground = luminance(getComputedStyle(document.body).backgroundColor);
    const texts = Array.from(document.querySelectorAll("body *")).filter((each) =>
        Array.from(each.childNodes).some((node) => node.nodeType == 3 && node.data.trim())
        && !["title", "desc"].includes(each.tagName));
    return texts.map((each) => {
        const style = getComputedStyle(each);
        const ink = luminance(each.tagName == "text" ? style.fill : style.color);
        return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    });
})()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FaultyRun:
    """A run of two ranks, of which one was killed."""
    run = FaultyRun(tmp_path_factory.mktemp("run"), "torch", epochs=3)
    job = run.start(supervised("--no-standby"), {"OMP_NUM_THREADS": "1", **run.faults})
    try:
        run.wait_for(job, lambda batch: batch.commit >= KILLED_AT)
        generation = max(run.generations())
        kill(run.process_of(1))
        wait_until_all_train(run, job, generation)
        assert job.wait(400) == 0, job.tail()
    finally:
        job.kill()
    return run


@pytest.fixture(scope="module")
def page(run: FaultyRun) -> Path:
    return report(run.folder / "events", run.folder / "page.html")


def report(events: Path, page: Path) -> Path:
    """Write the page of a run."""
    command = [sys.executable, "-m", "hvdrecover", "report", str(events), "--html", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return page


def boxes(tab: Browser, style: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tab.value(f"({BOXES})({json.dumps(style)})")
    return found


def test_the_page_asks_for_nothing_and_complains_of_nothing(tab: Browser, page: Path) -> None:
    tab.open(page, 1100)
    tab.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    asked = [event["request"]["url"] for event in tab.told("Network.requestWillBeSent")]
    assert [url for url in asked if not url.startswith("data:")] == [page.as_uri()]
    assert tab.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []


def test_what_each_rank_was_doing_is_drawn(tab: Browser, page: Path, run: FaultyRun) -> None:
    tab.open(page, 1100)
    (fault,) = run.events("fault")
    (cross,) = boxes(tab, "path.fault")
    assert f"crash of rank 1 on {fault['host']}" in cross["title"]
    middle = (cross["left"] + cross["right"]) / 2
    lanes: dict[float, list[dict[str, Any]]] = {}
    for style in ("starting", "training", "recovery"):
        for bar in boxes(tab, f"rect.{style}"):
            lanes.setdefault(bar["top"], []).append(bar | {"style": style})
    for rank, top in enumerate(sorted(lanes)):
        bars = sorted(lanes[top], key=lambda bar: bar["left"])
        assert [bar["style"] for bar in bars] == ["starting", "training", "recovery", "training"]
        assert all(f"rank {rank} on " in bar["title"] for bar in bars)
        assert bars[2]["left"] == pytest.approx(middle, abs=1.0)
        assert "rendezvous " in bars[2]["title"]
        assert (top < cross["top"] < cross["bottom"] < bars[0]["bottom"]) == (rank == 1)
    assert len(lanes) == 2
    assert len(boxes(tab, "path.start")) == 1


def test_every_commit_is_a_tick_and_the_durable_ones_are_longer(
    tab: Browser, page: Path, run: FaultyRun
) -> None:
    tab.open(page, 1100)
    titles = {
        style: [tick["title"] for tick in boxes(tab, f"line.{style}")] for style in ("commit", "durable")
    }
    for kind, shown in (("commit", titles["commit"] + titles["durable"]), ("durable", titles["durable"])):
        numbers = {(event["generation"], event["commit"]) for event in run.events(kind)}
        assert 0 < len(shown) <= len(numbers)
    heights = {
        style: {round(tick["bottom"] - tick["top"]) for tick in boxes(tab, f"line.{style}")}
        for style in titles
    }
    assert all(short < long for short in heights["commit"] for long in heights["durable"])


def test_the_terminals_facts_are_on_the_page(tab: Browser, page: Path, run: FaultyRun) -> None:
    command = [sys.executable, "-m", "hvdrecover", "report", str(run.folder / "events"), "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)
    tab.open(page, 1100)
    shown = tab.value("document.body.innerText")
    row, detail = tab.value(
        "Array.from(document.querySelectorAll('section[aria-labelledby=faults] tbody tr'), (row) =>"
        " Array.from(row.cells, (cell) => cell.innerText))"
    )
    assert [row[0], row[2], row[4], *detail] == ["1", "crash", "1", found["faults"][0]["detail"]]
    assert f"{found['goodput']:.1%}" in shown
    assert f"{found['steps_repeated']} steps, {found['commits_repeated']} commits" in shown
    assert "finished" in shown


@pytest.mark.parametrize("width", [320, PHONE, 768, 1100])
def test_the_page_is_as_wide_as_the_screen(tab: Browser, page: Path, width: int) -> None:
    tab.open(page, width)
    assert tab.value("document.documentElement.scrollWidth") <= width
    assert tab.value(CUT) == []


def test_on_a_phone_the_time_line_can_be_scrolled_in_its_box(tab: Browser, page: Path) -> None:
    tab.open(page, PHONE)
    box = "document.querySelector('.chart .scroll')"
    end = tab.value(f"{box}.scrollLeft = 1e6, {box}.scrollLeft + {box}.clientWidth - {box}.scrollWidth")
    assert abs(end) <= 1
    assert tab.value(f"{box}.scrollLeft") > 0
    assert tab.value("scrollX") == 0
    assert max(bar["right"] for bar in boxes(tab, "rect.training")) <= PHONE


@pytest.mark.parametrize(
    ("scheme", "media", "dark"), [("light", "", False), ("dark", "", True), ("dark", "print", False)]
)
def test_texts_stand_out_from_the_ground(
    tab: Browser, page: Path, scheme: str, media: str, dark: bool
) -> None:
    tab.open(page, 1100, scheme=scheme, media=media)
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    assert (ground != "rgb(255, 255, 255)") == dark
    contrasts = tab.value(CONTRASTS)
    assert len(contrasts) > 20
    assert min(contrasts) >= 4.5


def test_on_paper_nothing_is_cut(tab: Browser, page: Path) -> None:
    tab.open(page, PAPER, media="print")
    assert tab.value(CUT) == []
    assert tab.value("getComputedStyle(document.querySelector('.chart .scroll')).overflowX") == "visible"
    printed = tab.printed()
    assert printed.startswith(b"%PDF-")
    assert printed.count(b"/Type /Page\n") in (1, 2)


def test_who_cannot_see_it_is_told(tab: Browser, page: Path) -> None:
    tab.open(page, 1100)
    nodes = tab.do("Accessibility.getFullAXTree")["nodes"]
    told = {
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node
    }
    (name,) = [name for role, name in told if role in ("image", "img")]
    assert name.startswith("Time line of 2 ranks over ")
    descriptions = [node["description"]["value"] for node in nodes if node.get("description")]
    assert any("1 fault, " in text and "crash of rank 1" in text for text in descriptions)
    assert {("columnheader", name) for name in ("fault", "host", "to recover", "steps")} <= told
    assert {("heading", name) for name in ("Time line", "Faults", "The run")} <= told


# -- runs that are not like that ------------------------------------------------------------------------


def without_faults(run: Run) -> None:
    ranks: Ranks = {0: ("node-1", 10)}
    run.rendezvous(4, ranks, 1, 0, "initial")
    run.commit(ranks, 1, {1: 9, 2: 14})


def one_event(run: Run) -> None:
    run.fault(1, rank=-1, detail="exit code 1")


def many_ranks(run: Run) -> None:
    """With more faults than have room for their names."""
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


def hostile(run: Run) -> None:
    ranks: Ranks = {0: (f"{HOSTILE[8:36]}\u202e".replace("/", ""), 10)}
    run.report(0, "start", HOSTILE[:7].strip("</"), pid=5, attempt=1, command=["python"])
    run.rendezvous(4, ranks, 1, 0, "initial")
    run.commit(ranks, 1, {1: 9, 2: 14})
    run.fault(20, HOSTILE, detail=f"{HOSTILE}\x00\ud800")
    run.report(30, "gave_up", pid=5, scope="job", reason=HOSTILE)
    run.report(31, "end", pid=5, code=3, reason=HOSTILE)


@pytest.mark.parametrize("told", [without_faults, one_event, many_ranks, hostile])
def test_any_run_fits_the_screen_and_the_paper(tab: Browser, tmp_path: Path, told: Any) -> None:
    run = Run(tmp_path / "events")
    told(run)
    page = report(run.folder, tmp_path / "page.html")
    for width, media in ((PHONE, ""), (1100, ""), (PAPER, "print")):
        tab.open(page, width, media=media)
        assert tab.value("document.documentElement.scrollWidth") <= width
        assert tab.value(CUT) == []
    assert tab.printed().startswith(b"%PDF-")
    assert tab.told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded") == []


def test_what_events_say_is_text_and_nothing_else(tab: Browser, tmp_path: Path) -> None:
    run = Run(tmp_path / "events")
    hostile(run)
    tab.open(report(run.folder, tmp_path / "page.html"), 1100)
    assert tab.value("document.querySelectorAll('script, img, iframe, object, a').length") == 0
    detail = tab.value("document.querySelector('tr.detail td').textContent")
    assert detail == HOSTILE + r"\x00\ud800"
    assert HOSTILE in tab.value("document.querySelector('path.fault title').textContent")
    assert r"\u202e" in tab.value("document.body.textContent")
    asked = [event["request"]["url"] for event in tab.told("Network.requestWillBeSent")]
    assert [url for url in asked if url.startswith("http")] == []
