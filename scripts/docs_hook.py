"""The hook of mkdocs: pages that are written for a code host become pages of the site.

The README is the home page; CONTRIBUTING and CHANGELOG are pages. A link to another file of the repository
leads to a page that shows it, so that a copy of the site is whole without the repository.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SHOWN = "files"  # the folder of the site with files of the repository
LANGUAGES = {".json": "json", ".py": "python", ".yaml": "yaml", ".yml": "yaml", "Dockerfile": "docker"}
COLOURS = {".highlight": "default", "[data-bs-theme=dark] .highlight": "github-dark"}  # Pygments' styles
LINK = re.compile(r'(?:(?<=]\()|(?<=src=")|(?<=href="))(?!\w+:|#)([^)\s#"]+)(#[^)\s"]*)?(?=[)"])')
NAME = re.compile(r"(?<=[ (\n])<code>(\w+)</code>")
FENCE, ITEM = re.compile(r"\s*(`{3,})"), re.compile(r"([-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> None:
    """List the pages that mkdocs.yml does not name at the end, so that none is left out."""
    pages = {path.relative_to(config.docs_dir).as_posix() for path in Path(config.docs_dir).rglob("*.md")}
    others = sorted(pages - set(re.findall(r"[\w/-]+\.md", str(config.nav))))
    if others:
        config.nav.append({"More": others})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, those of files that any page links to, and the colours of code."""
    styles = (HtmlFormatter(style=style).get_style_defs(under) for under, style in COLOURS.items())
    files.append(File.generated(config, "code.css", content="\n".join(styles)))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page in [*files.documentation_pages()]:
        for path, _ in LINK.findall(page.content_string):
            _show(_in_repository(page.src_uri, path), files, config)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links, and what is nested in lists, into what mkdocs and Python-Markdown read."""
    if page.file.src_uri.startswith(f"{SHOWN}/"):
        return markdown
    lines, nested, fence = [], False, ""
    for line in markdown.split("\n"):
        if not fence:
            line = LINK.sub(functools.partial(_link, page.file.src_uri), line)
            nested = (nested and line[:1] in ("", " ")) or bool(ITEM.match(line))
        if nested and line.startswith(" "):  # CommonMark asks for an indent by two, Python-Markdown for four
            line = " " * (len(line) - len(line.lstrip())) + line
        if (found := FENCE.match(line)) and fence in ("", found[1]):
            fence = "" if fence else found[1]
        lines.append(line)
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leave out the colons before what docstrings show as it is, and link the names that they speak of."""
    html = html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
    entries = {entry.rpartition(".")[2]: entry for entry in re.findall(r'<h2 id="(hvdrecover\.[^"]+)"', html)}
    return NAME.sub(lambda name: _to_entry(name, entries), html)


def _to_entry(name: re.Match[str], entries: dict[str, str]) -> str:
    return f'<a href="#{entries[name[1]]}">{name[0]}</a>' if name[1] in entries else name[0]


def _source(page: str) -> PurePosixPath:
    """Return the file of the repository that a page is made from."""
    outside = {made: source for source, made in PAGES.items()}
    return PurePosixPath(outside.get(page, f"docs/{page}"))


def _in_repository(page: str, path: str) -> str:
    """Return the path in the repository that a page's link leads to."""
    return os.path.normpath(_source(page).parent / path)


def _in_site(path: str) -> str:
    """Return the source, for the site, of a path in the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"{SHOWN}/{path}{'/index' if (ROOT / path).is_dir() else ''}.md"


def _link(page: str, link: re.Match[str]) -> str:
    target = _in_site(_in_repository(page, link[1]))
    return os.path.relpath(target, PurePosixPath(page).parent) + (link[2] or "")


def _show(path: str, files: Files, config: MkDocsConfig) -> None:
    """Add a page that shows a file or a folder, if there is none; a link to nothing is left to mkdocs."""
    place, page = ROOT / path, _in_site(path)
    if page in files.src_uris or path.startswith(("docs/", "..")) or not place.exists():
        return
    shown = f"# {path}\n\n{_folder(place) if place.is_dir() else _file(place)}"
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
