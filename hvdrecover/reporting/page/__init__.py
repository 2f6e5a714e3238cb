"""A report as one HTML page that needs nothing else, and its time line as a picture.

`content` is what a page can hold, and `run` fills it from a run's events; others may fill it with sections of
their own. `rendering` makes the page of it. `drawing` lays a time line out as shapes, which the page's
template and `picture` draw alike. What these two need is imported when it is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.reporting.page.content import Page
    from hvdrecover.reporting.timeline import Timeline


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
        raise _missing("--html", "jinja2", error) from error
    try:
        path.write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--html", f"'{path}' can't be written: {error}") from error


def write_png(timeline: Timeline, path: Path) -> None:
    """Write a picture of a time line.

    Args:
        timeline: what to draw.
        path: PNG file to write; one that is there is replaced.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    try:
        from hvdrecover.reporting.page.picture import save
    except ImportError as error:
        raise _missing("--png", "matplotlib", error) from error
    try:
        save(timeline, path)
    except OSError as error:
        raise ConfigError("--png", f"'{path}' can't be written: {error}") from error


def _missing(option: str, package: str, error: ImportError) -> ConfigError:
    return ConfigError(option, f"{package} can't be imported ({error}); pip install 'hvdrecover[report]'")
