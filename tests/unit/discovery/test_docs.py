"""The command lines of docs/discovery.md are understood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdrecover.cli import discovering
from hvdrecover.discovery import Host, sources

DOCS = (Path(__file__).parents[3] / "docs" / "discovery.md").read_text()
OWN = "rack"  # the example of a source of one's own
WAYS = (
    r'--discover "([^"]*)"',
    r"--discover ([a-z-]+)",
    r'--host-discovery-script[\s\\]+"discover-hosts ([^"]*)"',
    r"^\$ hvdrecover discover (.*)",
)
REQUESTS = sorted({found for way in WAYS for found in re.findall(way, DOCS, re.MULTILINE)})


@pytest.mark.parametrize("request_", [request for request in REQUESTS if not request.startswith(OWN)])
def test_a_command_line_is_understood(request_: str) -> None:
    assert discovering.parse(discovering.request(request_, []))


def test_the_example_of_a_source_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's command line names the source, too."""
    (module,) = re.findall(r"^```python\n(# my_cluster\.py\n.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_cluster.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sources.OURS, OWN, "my_cluster:rack")
    (words,) = [request for request in REQUESTS if request.startswith(OWN)]
    source, _ = discovering.parse(discovering.request(words, []))
    assert source({}, 5.0) == [Host("rack7-a", 4), Host("rack7-b", 4)]
