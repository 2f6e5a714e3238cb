"""The page of a run, and its time line."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from hvdrecover import record
from hvdrecover.cli import main
from hvdrecover.reporting import page, timeline
from hvdrecover.reporting.summary import Run
from tests.unit.reporting.runs import TWO, example
from tests.unit.reporting.runs import Run as Written

HOSTILE = "</title><script>alert(1)</script><img src=//evil onerror=alert(2)>'\"&\x1b\u202e"


class Elements(HTMLParser):
    """All elements of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def page_of(run):
    return page.page("runs/1", Run(record.read(run.folder)))


def drawn(run):
    followed = Run(record.read(run.folder))
    report = followed.report()
    return timeline.draw(followed, report, timeline.trace(followed, report))


def of_ranks(folder, count, faults=1):
    """A run of many ranks on hosts of eight, with faults that are 100 s apart."""
    ranks = {rank: (f"node-{rank // 8}.cluster", 100 + rank) for rank in range(count)}
    run = Written(folder)
    run.rendezvous(4, ranks, 1, 0, "initial")
    for number in range(1, faults + 1):
        run.commit(ranks, number, {number: 100 * number - 50})
        run.fault(100 * number, host=ranks[number % count][0], rank=number % count, commit=[number, number])
        run.rendezvous(100 * number + 5, ranks, number + 1, number)
        run.step(100 * number + 6, ranks, number + 1, number)
    run.finish(100 * faults + 50, ranks, faults + 1, faults + 1)
    return run


def test_the_page_of_a_run_has_what_a_person_asks_for(tmp_path):
    run = example(tmp_path)
    run.report(50, "durable", pid=10, generation=2, commit=4, bytes=2_000_000, seconds=0.5)
    text = page_of(run)
    for expected in (
        "runs/1",
        "66.5%",
        "22.7 s",
        "killed by SIGKILL",
        "load_batch (train.py:31)",
        "finished",
    ):
        assert expected in text
    assert "2.0 MB in 0.50 s, 0.50 s a commit" in text
    assert "Linux x86_64, 2 processors" in text and "torch 2.13.0" in text


def test_what_events_say_is_text_and_nothing_else(tmp_path):
    run = Written(tmp_path)
    run.rendezvous(1, {0: (HOSTILE, 10)}, 1, 0, "initial")
    run.commit({0: (HOSTILE, 10)}, 1, {1: 2})
    run.fault(2, HOSTILE, HOSTILE, detail=HOSTILE)
    run.report(3, "gave_up", scope="job", reason=HOSTILE)
    run.report(4, "end", code=1, reason=HOSTILE)
    text = page_of(run)
    tags = {tag for tag, _ in Elements(text).found}
    assert not {"script", "img"} & tags
    assert "\x1b" not in text and "\u202e" not in text


def test_columns_and_cells_fit_each_other(tmp_path):
    text = page_of(example(tmp_path))
    for table in re.findall(r"<table.*?</table>", text, re.DOTALL):
        heads = table.count("<th ")
        for row in re.findall(r"<tr(?: class=\"more\")?><td.*?</tr>", table):
            assert len(re.findall("<td[ >]", row)) == heads


def test_the_command_writes_it_beside_what_it_says(tmp_path, capsys):
    example(tmp_path / "events")
    assert main(["report", str(tmp_path / "events"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert "outcome    finished" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "events"), "--html", str(tmp_path / "no" / "page.html")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# -- the time line -------------------------------------------------------------------------------------


def bars(text, style):
    """Place and width of bars, in percents of the time."""
    found = re.findall(rf'<rect class="{style}" x="([\d.]+)%" y="([\d.]+)" width="([\d.]+)%"', text)
    return [tuple(map(float, each)) for each in found]


def test_each_rank_has_a_lane_with_its_stretches(tmp_path):
    text = drawn(example(tmp_path))
    assert len({y for _, y, _ in bars(text, "training")}) == 2
    assert [len(bars(text, style)) for style in ("starting", "training", "recovery")] == [2, 6, 4]
    x, _, width = bars(text, "recovery")[1]
    assert (x, width) == (pytest.approx(100 * 60 / 104, abs=0.01), pytest.approx(100 * 22.7 / 104, abs=0.1))
    assert "fault 2: hang of rank 0 on node-1" in text and "noticed" in text


def test_a_short_recovery_in_a_long_run_is_seen(tmp_path):
    run = Written(tmp_path)
    run.rendezvous(0, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 1})
    run.fault(50_000, commit=[1, 1])
    run.rendezvous(50_000.1, TWO, 2, 1)
    run.step(50_000.2, TWO, 2, 1)
    run.finish(100_000, TWO, 2, 2)
    assert all(width >= 0.2 for _, _, width in bars(drawn(run), "recovery"))


def test_thousands_of_commits_are_thinned_out_and_durable_ones_stay(tmp_path):
    run = Written(tmp_path)
    run.rendezvous(0, {0: TWO[0]}, 1, 0, "initial")
    run.commit({0: TWO[0]}, 1, {number: number for number in range(1, 3000)})
    run.report(1500, "durable", pid=10, generation=1, commit=1500, bytes=1, seconds=1)
    text = drawn(run)
    assert 100 < text.count('<line class="commit"') <= 200
    assert text.count('<line class="durable"') == 1


def test_a_commit_is_durable_once_any_rank_says_so_also_after_the_next_rendezvous(tmp_path):
    run = Written(tmp_path)
    run.rendezvous(0, TWO, 1, 0, "initial")
    run.commit(TWO, 1, {1: 10, 2: 20, 3: 30})
    run.report(25, "durable", pid=10, generation=1, commit=2)
    run.rendezvous(41, TWO, 2, 3)
    run.commit(TWO, 2, {4: 50})
    run.report(52, "durable", pid=10, generation=1, commit=3)
    found = re.findall(r'<line class="(durable|commit)".*?<title>commit (\d)', drawn(run))
    assert found == [("commit", "1"), ("durable", "2"), ("durable", "3"), ("commit", "4")]


@pytest.mark.parametrize("count", [1, 8, 9, 64, 65, 300])
def test_lanes_do_not_overlap_and_their_names_have_room(tmp_path, count):
    text = drawn(of_ranks(tmp_path, count))
    tops = sorted({y for _, y, _ in bars(text, "training")})
    (height,) = {
        float(each) for each in re.findall(r'<rect class="training" x="[\d.]+%"[^>]* height="([\d.]+)"', text)
    }
    assert len(tops) == min(count, timeline.LANES)
    assert all(low - high > height for high, low in itertools.pairwise(tops))
    names = sorted(float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)">rank', text))
    assert all(low - high >= 13 for high, low in itertools.pairwise(names))
    assert ("more ranks are not drawn" in text) == (count > timeline.LANES)


def test_names_of_faults_do_not_cover_each_other(tmp_path):
    text = drawn(of_ranks(tmp_path, 8, faults=40))
    places = re.findall(r'<svg x="([\d.]+)%" y="[\d.]+"><text class="fault">([^<]+)', text)
    labels = [(float(x) * timeline.NARROWEST / 100, 6.8 * len(name)) for x, name in places]
    assert len(labels) > 10
    assert all(other > x + width for (x, width), (other, _) in itertools.pairwise(labels))
    assert text.count('<path class="fault"') == 40 + 1  # and one in the legend


@pytest.mark.parametrize("length", [0.0, 0.02, 7.0, 104.0, 5000.0, 90_000.0, 3e6, 9e7])
def test_ticks_are_few_round_and_told_apart(length):
    found = timeline.ticks(length)
    assert 1 <= len(found) <= 8
    assert len({text for _, text in found}) == len(found)
    assert all(0 <= time <= length for time, _ in found)
