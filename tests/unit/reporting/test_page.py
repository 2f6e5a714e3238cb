"""A report as a page."""

from __future__ import annotations

import importlib.resources
import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover import cli
from hvdrecover.redaction import printable
from hvdrecover.reporting import page, reading, summary, timeline
from hvdrecover.reporting.page import axis, content, drawing, run
from hvdrecover.reporting.page.rows import rows
from hvdrecover.reporting.page.shapes import Bar, Line, Mark
from hvdrecover.reporting.timeline import Commit, Start, Stretch, Strike, Timeline
from tests.unit.reporting.runs import example

pytest.importorskip("jinja2")

HOSTILE = "</title></style><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
VOID = {"meta", "link", "br", "img"}


class Parsed(HTMLParser):
    """A document, which must be well-formed: its tags, and what it says."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def count(self, tag, style=None):
        return sum(name == tag and style in (None, found.get("class")) for name, found in self.tags)


def fault(number, time, rank=0, kind="crash"):
    return Strike(number, time, kind, rank, "node-1", "killed by SIGKILL")


def made_up(length=100.0, lanes=None, faults=(), commits=(), starts=()):
    lanes = {0: [Stretch("training", 0, length, "node-1", 1, 0)]} if lanes is None else lanes
    return Timeline(1_767_268_800.0, length, lanes, faults, commits, starts)


def rendered(*blocks, title="A page"):
    from hvdrecover.reporting.page.rendering import render

    state = content.Badge("fine", "good")
    sections = [content.Section("Heading", blocks)]
    return Parsed(render(content.Page(title, "about", state, [content.Figure("wall time", "5 s")], sections)))


def shapes(drawn, kind, style):
    return [each for each in drawn.shapes if isinstance(each, kind) and each.style == style]


# -- the axis -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "texts"),
    [
        (0.0, ["0"]),
        (0.031, ["0", "0.005 s", "0.01 s", "0.015 s", "0.02 s", "0.025 s", "0.03 s"]),
        (104.0, ["0", "15 s", "30 s", "45 s", "1 min", "1 min 15 s", "1 min 30 s"]),
        (7200.0, ["0", "30 min", "1 h", "1 h 30 min", "2 h"]),
        (260_000.0, ["0", "12 h", "1 d", "1 d 12 h", "2 d", "2 d 12 h", "3 d"]),
    ],
)
def test_ticks_are_at_round_times(length, texts):
    assert [text for _, text in axis.ticks(length, 7)] == texts


@given(st.floats(0, 1e12), st.integers(2, 12))
def test_ticks_are_few_and_told_apart(length, most):
    times, texts = zip(*axis.ticks(length, most), strict=True)
    assert len(times) <= most
    assert times[0] == 0 and times[-1] <= length * (1 + 1e-9)
    assert len(set(texts)) == len(texts)


# -- the drawing ----------------------------------------------------------------------------------------

TIMES = st.lists(st.floats(0, 100), max_size=40).map(sorted)


@given(TIMES)
def test_names_of_faults_cover_neither_each_other_nor_their_lines(times):
    drawn = drawing.draw(made_up(faults=[fault(number, time) for number, time in enumerate(times, 1)]))
    labels = [label for label in drawn.labels if label.fault]
    assert len(labels) >= min(len(times), 1)
    for at, label in enumerate(labels):
        left = label.x / 100 * drawing.NARROWEST
        right = left + 6.5 * len(label.text)
        for other in labels[at + 1 :]:
            if left <= other.x / 100 * drawing.NARROWEST < right:
                assert other.y > label.y  # it begins below, and its line goes down from there
        assert right <= drawing.NARROWEST + drawn.right


@given(TIMES)
def test_each_fault_is_told_of_by_a_cross(times):
    found = [fault(number, time, number % 3 - 1) for number, time in enumerate(times, 1)]
    crosses = shapes(drawing.draw(made_up(faults=found)), Mark, "fault")
    told = [int(number) for cross in crosses for number in re.findall(r"fault (\d+):", cross.title)]
    assert sorted(told) == list(range(1, len(times) + 1))


def test_thousands_of_commits_are_thinned_out_and_durable_ones_stay():
    commits = [Commit(each / 50, 1, each, each % 40 == 0) for each in range(5000)]
    drawn = drawing.draw(made_up(commits=commits))
    ticks = shapes(drawn, Line, "durable") + shapes(drawn, Line, "commit")
    assert len(ticks) <= drawing.TICKS
    assert len(shapes(drawn, Line, "durable")) >= 100
    assert "commits 0 to " in ticks[0].title and " of " in ticks[0].title
    spans = [re.match(r"commits (\d+) to (\d+)", tick.title).groups() for tick in ticks]
    assert sum(int(last) - int(first) + 1 for first, last in spans) == 5000


def test_a_short_recovery_in_a_long_run_is_seen():
    week = 7 * 86400.0
    phases = {"reset": 0.02, "first_step": 0.05}
    lane = [
        Stretch("training", 0, 1000, "node-1", 1, 0),
        Stretch("recovery", 1000, 1000.3, "node-1", 2, 7, phases),
        Stretch("training", 1000.3, week, "node-1", 2, 7),
    ]
    (bar,) = shapes(drawing.draw(made_up(week, {0: lane})), Bar, "recovery")
    assert bar.width >= 0.2
    assert "recovery to commit 7 in 0.30 s" in bar.title
    assert bar.title.endswith("its own phases: reset 0.02 s, first step 0.05 s")


def test_many_recoveries_at_one_place_are_one_bar():
    activities = ("training", "recovery")
    lane = [Stretch(activities[each % 2], each, each + 1, "node-1", each, 0) for each in range(10)]
    lane.append(Stretch("training", 10, 100_000, "node-1", 11, 0))
    drawn = drawing.draw(made_up(100_000.0, {0: lane}))
    (bar,) = shapes(drawn, Bar, "recovery")
    assert "5 recoveries in 10.0 s" in bar.title
    assert len(shapes(drawn, Bar, "training")) == 1


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 32, 33, 64, 65, 200, 1000])
def test_lanes_do_not_overlap_and_their_names_have_room(ranks):
    lanes = {rank: [Stretch("training", 0, 100, "node-1", 1, 0)] for rank in range(ranks)}
    drawn = drawing.draw(made_up(lanes=lanes, faults=[fault(1, 50, ranks - 1)]))
    bars = sorted(shapes(drawn, Bar, "training"), key=lambda bar: bar.y)
    assert (len(bars), drawn.left_out) == (min(ranks, drawing.LANES), max(ranks - drawing.LANES, 0))
    assert all(after.y > bar.y + bar.height for bar, after in itertools.pairwise(bars))
    assert any(f"rank {ranks - 1} " in bar.title for bar in bars)  # it had a fault, so it is not left out
    places = [name.y for name in drawn.names]
    assert all(after - before >= 12 for before, after in itertools.pairwise(places))
    assert bars[-1].y + bars[-1].height < drawn.height < 1000  # pixels; so it fits on paper


def test_hosts_are_named_if_there_are_several():
    lanes = {rank: [Stretch("training", 0, 9, f"node-{rank}.example.org", 1, 0)] for rank in range(2)}
    assert [name.text for name in drawing.draw(made_up(lanes=lanes)).names] == [
        "rank 0 · node-0.exa…",
        "rank 1 · node-1.exa…",
    ]
    del lanes[1]
    assert [name.text for name in drawing.draw(made_up(lanes=lanes)).names] == ["rank 0"]


# -- the page -------------------------------------------------------------------------------------------


def test_the_page_of_a_run(tmp_path):
    log = reading.read(example(tmp_path / "events").folder)
    traced = timeline.trace(log)
    page.write_html(run.page("my run", summary.summarise(log), traced), tmp_path / "page.html")
    parsed = Parsed((tmp_path / "page.html").read_text())
    assert (parsed.count("table"), parsed.count("rect", "recovery")) == (2, 4 + 1)  # and in the legend
    text = " ".join(parsed.texts)
    machine, versions = "node-1, Linux x86_64, 2 processors", "python 3.11.9, torch 2.13.0"
    hang = "no progress; killed in load_batch (train.py:31)"
    for said in ("my run", "66.5%", "22.7 s", hang, "finished", machine, versions):
        assert said in text
    assert parsed.count("td") == 3 * 5 + 2 * 13


def test_every_kind_of_block():
    table = content.Table(
        "checks", [content.Column("check"), content.Column("result")], [("one", content.Badge("bad", "bad"))]
    )
    blocks = [content.Paragraphs(["a", "b"]), content.Items(["c", "d"]), content.Facts({"e": "f"}), table]
    parsed = rendered(*blocks, made_up(), made_up())
    assert [parsed.count(tag) for tag in ("li", "th", "td", "figure")] == [2, 2, 2, 2]
    assert parsed.count("span", "badge bad") == 1
    ids = [found["id"] for _, found in parsed.tags if "id" in found]
    assert len(ids) == len(set(ids))


def test_a_page_names_nothing_outside_itself():
    parsed = rendered(made_up(starts=[Start(0, 1)]))
    assert not {"script", "img", "iframe", "object", "a"} & {tag for tag, _ in parsed.tags}
    named = [value for _, found in parsed.tags for key, value in found.items() if key in ("src", "href")]
    assert named == ["data:,"]
    assert not re.search(r"url\(|@import", " ".join(parsed.texts))
    (policy,) = [found["content"] for tag, found in parsed.tags if "http-equiv" in found]
    assert policy.startswith("default-src 'none'")


def test_texts_are_taken_as_they_are():
    lanes = {0: [Stretch("training", 0, 50, HOSTILE, 1, 0), Stretch("recovery", 50, 100, "b", 2, 0)]}
    facts = content.Facts({HOSTILE: HOSTILE})
    table = content.Table(HOSTILE, [content.Column(HOSTILE)], [[HOSTILE], [content.Badge(HOSTILE, "bad")]])
    strike = Strike(1, 5, HOSTILE, 0, HOSTILE, f"{HOSTILE}\x00\x1b[31m\ud800\u202e")
    parsed = rendered(facts, table, made_up(lanes=lanes, faults=[strike]), title=HOSTILE)
    assert parsed.count("script") == parsed.count("img") == 0
    text = "".join(parsed.texts)
    assert text.count(HOSTILE) >= 8
    assert r"\x00\x1b[31m\ud800\u202e" in text
    text.encode()


def variables():
    """The page's colours: of the light scheme, and of the dark one."""
    css = (importlib.resources.files("hvdrecover.reporting.page") / "templates" / "page.css").read_text()
    found = re.findall(r":root \{([^}]*)\}", css)
    return [dict(re.findall(r"--(\w+): (#\w{6});", block)) for block in found]


def luminance(colour):
    """Relative luminance of an sRGB colour, from 0 to 1 (WCAG 2.2)."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize(
    ("name", "least"),
    [
        *((text, 4.5) for text in ("ink", "muted", "good", "bad", "fault")),
        *((bar, 3.0) for bar in ("training", "recovery", "starting")),
    ],
)
def test_colours_stand_out_from_the_paper(scheme, name, least):
    colours = variables()[scheme]
    low, high = sorted((luminance(colours[name]), luminance(colours["paper"])))
    assert (high + 0.05) / (low + 0.05) >= least


# -- the command ----------------------------------------------------------------------------------------


def test_the_command_writes_it_beside_what_it_says(tmp_path, capsys):
    example(tmp_path / "events")
    files = ["--html", str(tmp_path / "page.html")]
    assert cli.main(["report", str(tmp_path / "events"), *files]) == 0
    with_files = capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "events")]) == 0
    assert capsys.readouterr() == with_files
    assert Parsed((tmp_path / "page.html").read_text()).count("svg") > 0


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path, capsys):
    example(tmp_path / "events")
    assert cli.main(["report", str(tmp_path / "events"), "--html", str(tmp_path / "no" / "file")]) == 1
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"hvdrecover: --html: '{tmp_path / 'no' / 'file'}' ")


def test_without_its_package_there_is_an_error_that_names_the_extra(tmp_path):
    example(tmp_path / "events")
    program = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from hvdrecover.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "report", str(tmp_path / "events")]
    plain, asked = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=120)
        for more in ([], ["--html", str(tmp_path / "file")])
    )
    assert (plain.returncode, plain.stderr) == (0, "")
    assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (1, "", 1)
    assert asked.stderr.startswith("hvdrecover: --html: jinja2 ")
    assert "pip install 'hvdrecover[report]'" in asked.stderr


@pytest.mark.parametrize(
    ("text", "shown"), [("a ü 漢", "a ü 漢"), ("\x1b[0m\n", r"\x1b[0m\n"), ("\u202e\ud800", r"\u202e\ud800")]
)
def test_what_would_be_obeyed_is_shown(text, shown):
    assert printable(text) == shown


# -- rows of a time line --------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1000), max_size=120).map(sorted), st.integers(1, 40), st.floats(1, 5000))
def test_a_time_line_in_rows_has_all_that_it_has_whole(times, ranks, length):
    times = [min(time, length) for time in times]
    lanes = {rank: [Stretch("training", 0, length, "node-1", 1, 0)] for rank in range(ranks)}
    faults = [fault(number, time) for number, time in enumerate(times, 1)]
    commits = [Commit(time, 1, number, True) for number, time in enumerate(times)]
    parts = rows(made_up(length, lanes, faults, commits, [Start(0, 1)]))
    assert [each for part in parts for each in part.faults] == faults
    assert [each for part in parts for each in part.commits] == commits
    assert sum(len(part.starts) for part in parts) == 1
    for rank in lanes:
        lane = [stretch for part in parts for stretch in part.lanes[rank]]
        assert (lane[0].begin, lane[-1].end) == (0, length)
        assert all(before.end == after.begin for before, after in itertools.pairwise(lane))
    assert len(parts) == 1 or len(parts) * ranks <= 48
    assert len({part.length for part in parts}) == 1  # one scale


def test_forty_faults_are_in_rows_with_round_times_and_each_has_its_name():
    faults = [fault(number, 25 * number) for number in range(1, 41)]
    parts = rows(made_up(1010.0, faults=faults))
    assert [part.begin for part in parts] == [0, 150, 300, 450, 600, 750, 900]
    drawn = [drawing.draw(part) for part in parts]
    times = [label.text for label in drawn[1].labels if not label.fault]
    assert times == ["2 min 30 s", "3 min", "3 min 30 s", "4 min", "4 min 30 s", "5 min"]
    assert sum(label.fault for row in drawn for label in row.labels) == 40
    assert rendered(made_up(1010.0, faults=faults)).count("figure") == 1
