"""A report as one HTML page that needs nothing else.

`content` is what a page can hold, and `run` fills it from a run's events; others may fill it with sections of
their own. `drawing` lays a time line out as shapes, which the page's template draws. `rendering` makes the
page; what that needs is imported when it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.reporting.page.content import Page


def write_html(page: Page, path: Path) -> None:
    """Write a page.

    Args:
        page: what it holds.
        path: HTML file to write; one that is there is replaced.

    Raises:
        ConfigError: jinja2 is not installed, or the file can't be written.
    """
    try:
        from hvdrecover.reporting.page.rendering import render
    except ImportError as error:
        remedy = "pip install 'hvdrecover[report]'"
        raise ConfigError("--html", f"jinja2 can't be imported ({error}); {remedy}") from error
    try:
        path.write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--html", f"'{path}' can't be written: {error}") from error
