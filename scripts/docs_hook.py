"""The hook of mkdocs: pages that are written for a code host become pages of the site.

The README is the home page; CONTRIBUTING and CHANGELOG are pages. A link to another file of the repository
leads to a page that shows it, so that a copy of the site is whole without the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SHOWN = "files"  # the folder of the site with files of the repository
LANGUAGES = {".json": "json", ".py": "python", ".yaml": "yaml", ".yml": "yaml", "Dockerfile": "docker"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE, ITEM = re.compile(r"\s*(`{3,})"), re.compile(r"([-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, and those of files that any page links to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page in [*files.documentation_pages()]:
        for path, _ in LINK.findall(page.content_string):
            _show(_in_repository(page.src_uri, path), files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links, and what is nested in lists, into what mkdocs reads."""
    if page.file.src_uri.startswith(f"{SHOWN}/"):
        return markdown
    return LINK.sub(lambda link: _link(page.file.src_uri, link), _indented(markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out the colons by which docstrings begin what is to be shown as it is."""
    return re.sub(r"(<p>:|(?<=:)):</p>", lambda colons: "" if colons[1].startswith("<") else "</p>", html)


def _source(page: str) -> PurePosixPath:
    """Return the file of the repository that a page is made from."""
    outside = {made: source for source, made in PAGES.items()}
    return PurePosixPath(outside.get(page, f"docs/{page}"))


def _in_repository(page: str, path: str) -> str:
    """Return the path in the repository that a page's link leads to."""
    return os.path.normpath(_source(page).parent / path)


def _is_shown(path: str) -> bool:
    return not path.startswith(("docs/", "..")) and path not in PAGES


def _link(page: str, link: re.Match[str]) -> str:
    path = _in_repository(page, link[1])
    if path.startswith("docs/"):
        target = path.removeprefix("docs/")
    else:
        target = PAGES.get(path) or f"{SHOWN}/{path}{'/index' if (ROOT / path).is_dir() else ''}.md"
    return os.path.relpath(target, PurePosixPath(page).parent) + (link[2] or "")


def _show(path: str, files: Files, config: MkDocsConfig) -> None:
    """Add a page that shows a file or a folder, if it isn't there; a link to nothing is left to mkdocs."""
    place = ROOT / path
    if not _is_shown(path) or not place.exists():
        return
    page = f"{SHOWN}/{path}{'/index' if place.is_dir() else ''}.md"
    if page in files.src_uris:
        return
    content = _folder(place) if place.is_dir() else _file(place)
    shown = f"# {path}\n\n{content}"
    files.append(File.generated(config, page, content=shown, inclusion=InclusionLevel.NOT_IN_NAV))
    if place.is_dir():
        for each in sorted(place.iterdir()):
            _show(f"{path}/{each.name}", files, config)


def _folder(folder: Path) -> str:
    names = sorted(each.name + ("/index" if each.is_dir() else "") for each in folder.iterdir())
    return "\n".join(f"- [{name.removesuffix('/index')}]({name}.md)" for name in names)


def _file(file: Path) -> str:
    text = file.read_text().rstrip()
    language = "bash" if text.startswith("#!/bin/") else LANGUAGES.get(file.suffix or file.name, "text")
    return f"~~~~~~ {language}\n{text}\n~~~~~~"


def _indented(markdown: str) -> str:
    """Indent what is nested in a list by four, for Python-Markdown; CommonMark is content with two."""
    lines, nested, fence = [], False, ""
    for line in markdown.split("\n"):
        if not fence and line and not line.startswith(" "):
            nested = bool(ITEM.match(line))
        if nested and line.startswith(" "):
            line = " " * (len(line) - len(line.lstrip())) + line
        if (found := FENCE.match(line)) and fence in ("", found[1]):
            fence = "" if fence else found[1]
        lines.append(line)
    return "\n".join(lines)
