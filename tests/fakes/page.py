"""A process's page anew, as at the beginning of its life."""

from __future__ import annotations

import pytest

from hvdrecover import heartbeat
from hvdrecover.heartbeat import Page


def new_page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """Give this process a page that nobody has written to, until the end of the test."""
    page = Page.from_buffer(bytearray(heartbeat.SIZE))
    monkeypatch.setattr(heartbeat, "page", page)
    monkeypatch.setattr(heartbeat, "_notes", None)
    monkeypatch.setattr(heartbeat, "_at_progress", [])
    monkeypatch.setattr(heartbeat, "_at_commit", [])
    return page
