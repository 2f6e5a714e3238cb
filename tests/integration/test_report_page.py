"""The page of a run in a real browser, on screens of several widths."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.cli import main
from tests.unit.reporting.runs import Ranks, Run, example

CHROMIUM = shutil.which("chromium")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
OPTIONS += ("--disable-web-security", "--enable-logging=stderr")
WIDTHS = (320, 375, 768, 1100)  # CSS pixels
HOSTILE = (
    "</title><script>console.error(1)</script><img src=http://127.0.0.1:9/ onerror=console.error(2)>'\"&"
)
# The page in frames of some widths. A script looks into them from outside: the page itself allows none.
LOOK = """<!doctype html>
%s
<script>
onload = () => {
    const look = (window, document) => (%s);
    const frames = Array.from(document.querySelectorAll("iframe"));
    const found = frames.map((each) => look(each.contentWindow, each.contentDocument));
    document.body.innerHTML = "<pre></pre>";
    document.querySelector("pre").textContent = JSON.stringify(found);
};
</script>"""
BOXES = """Array.from(document.querySelectorAll(".plot > svg " + %s), (shape) => {
    const box = shape.getBoundingClientRect();
    return {left: box.left, right: box.right, top: box.top, bottom: box.bottom,
            title: shape.querySelector("title") ? shape.querySelector("title").textContent : ""};
})"""
# What sticks out of its box and cannot be scrolled to, and what the page would load. Captions are invisible:
# they are there for screen readers.
FITS = """[document.documentElement.scrollWidth - window.innerWidth,
    Array.from(document.querySelectorAll("body *")).filter((each) => {
        const box = each.getBoundingClientRect(), scrolls = each.closest(".scroll");
        const inside = scrolls && window.getComputedStyle(scrolls).overflowX == "auto";
        return !inside && each.tagName != "CAPTION" && box.width > 1 && box.right > window.innerWidth + 1;
    }).map((each) => each.outerHTML.slice(0, 200)),
    Array.from(document.querySelectorAll("[src], link:not([href^='data:'])"), (each) => each.outerHTML)]"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CI") != "true",
    reason="there is no browser; on Debian and Ubuntu: apt-get install chromium",
)


def look(page: Path, expression: str, *widths: int) -> list[Any]:
    """Return what an expression of JavaScript is in frames of some widths; the console must stay empty."""
    frames = (
        f'<iframe src="{page.name}" width="{width}" height="900" frameborder="0"></iframe>'
        for width in widths
    )
    looking = page.with_name("look.html")
    looking.write_text(LOOK % ("".join(frames), expression))
    command = [
        str(CHROMIUM),
        *OPTIONS,
        f"--user-data-dir={page.parent / 'profile'}",
        "--dump-dom",
        looking.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search("<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert found is not None, done.stdout
    values: list[Any] = json.loads(html.unescape(found[1]))
    return values


def boxes(page: Path, style: str) -> list[dict[str, Any]]:
    (found,) = look(page, BOXES % json.dumps(style), 1100)
    return sorted(found, key=lambda box: (box["top"], box["left"]))


def report(events: Path) -> Path:
    """Write the page of a run."""
    page = events.with_name("page.html")
    assert main(["report", str(events), "--html", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run of two ranks with two faults."""
    run = example(tmp_path_factory.mktemp("run") / "events")
    run.report(50, "durable", pid=10, generation=2, commit=4, bytes=2_000_000, seconds=0.5)
    return report(run.folder)


def test_the_faults_times_and_versions_are_on_the_page(page: Path) -> None:
    (shown,) = look(page, "document.body.innerText", 1100)
    for expected in ("66.5%", "22.7 s", "killed by SIGKILL", "load_batch (train.py:31)", "finished"):
        assert expected in shown
    assert "2.0 MB in 0.50 s, 0.50 s a commit" in shown
    assert "Linux x86_64, 2 processors" in shown and "torch 2.13.0" in shown


def test_the_time_line_has_each_ranks_activities_its_faults_and_commits(page: Path) -> None:
    crash, hang = sorted(boxes(page, "path.fault"), key=lambda box: box["left"])
    assert "crash of rank 1 on node-2" in crash["title"] and "hang of rank 0 on node-1" in hang["title"]
    recoveries = boxes(page, "rect.recovery")
    assert len(recoveries) == 4  # of two ranks
    assert all("rendezvous " in each["title"] for each in recoveries)
    assert recoveries[0]["left"] == pytest.approx((crash["left"] + crash["right"]) / 2, abs=2.0)
    assert recoveries[0]["top"] < crash["top"] and "rank 0 on " in recoveries[0]["title"]
    commits, (durable,) = boxes(page, "line.commit"), boxes(page, "line.durable")
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
def test_any_run_fits_screens_and_loads_nothing(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "events")
    for wider, cut, loaded in look(report(tmp_path / "events"), FITS, *WIDTHS):
        assert wider <= 0 and (cut, loaded) == ([], [])


def test_what_events_say_is_text_and_nothing_else(tmp_path: Path) -> None:
    hostile(tmp_path / "events")
    texts = ("'tr.detail td'", "'path.fault title'", "'body'")
    expression = ", ".join(f"document.querySelector({each}).textContent" for each in texts)
    elements = "document.querySelectorAll('script, img, iframe, object, a').length"
    ((number, detail, fault, body),) = look(report(tmp_path / "events"), f"[{elements}, {expression}]", 1100)
    assert number == 0
    assert detail == HOSTILE + r"\x00\ud800"
    assert HOSTILE in fault and r"\u202e" in body
