"""Pages as HTML."""

from __future__ import annotations

from typing import Any

import jinja2

from hvdrecover.redaction import printable as escaped
from hvdrecover.reporting.page import content, drawing, shapes
from hvdrecover.reporting.page.rows import rows
from hvdrecover.version import __version__


def render(page: content.Page) -> str:
    """Make an HTML document that needs no other file, no script and no network."""

    def printable(value: Any) -> Any:
        """Return a template's value as it is shown; texts that are markup come from the template itself."""
        return escaped(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvdrecover.reporting.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["kind"] = lambda block: type(block).__name__
    environment.filters["drawn"] = lambda timeline: [drawing.draw(row) for row in rows(timeline)]
    template = environment.get_template("page.html")
    return template.render(page=page, legend=shapes.LEGEND, narrowest=drawing.NARROWEST, version=__version__)
