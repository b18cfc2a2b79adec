"""Hooks for mkdocs: reference pages generated from the code, and links to files of the repository.

Pages are also read in the repository, so they link to examples, tools and the README there. On the site, such
a link becomes its text; a broken link is a warning, which `make docs` treats as an error.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools.documentation import cli_reference, python_reference, rest_reference, settings_reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^(`{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
LOADED = re.compile(r"<(?:script|img|link rel=.stylesheet.|iframe)[^>]*(?:src|href)=.(https?://[^\"' >]+)")
SOURCES = {"contributing.md": ROOT / "CONTRIBUTING.md"}
"""Pages whose files are outside docs/."""

REFERENCE = {
    "reference/cli.md": cli_reference.page,
    "reference/configuration.md": settings_reference.configuration_page,
    "reference/options.md": settings_reference.options_page,
    "reference/training.md": settings_reference.training_page,
    "reference/rest.md": rest_reference.page,
    "reference/python.md": python_reference.client_page,
    "reference/plugins.md": python_reference.plugins_page,
}
log = logging.getLogger("mkdocs.hooks.polar")


def on_files(files: Files, config: Any) -> Files:
    for place, make in REFERENCE.items():
        files.append(File.generated(config, place, content=make()))
    for place, source in SOURCES.items():
        files.append(File.generated(config, place, content=source.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = SOURCES.get(page.file.src_uri, DOCS / page.file.src_uri)
    here = DOCS / page.file.src_uri

    def resolved(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        place = Path(os.path.normpath(source.parent / target))
        if place.is_relative_to(DOCS):
            within = os.path.relpath(place, here.parent)
            if place.is_dir() and files.get_file_from_path(str(place.relative_to(DOCS) / "README.md")):
                within += "/README.md"
            return f"[{match['text']}]({within}{'#' + anchor if anchor else ''})"
        if not place.exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, match["target"])
        return str(match["text"])

    return _outside_fences(markdown, resolved)


def on_post_build(config: Any) -> None:
    """Warn about anything that a page loads from elsewhere: the site must work without a network."""
    for page in Path(config.site_dir).rglob("*.html"):
        for outside in LOADED.findall(page.read_text()):
            log.warning("%s loads %s from outside", page.name, outside)


def _outside_fences(markdown: str, resolved: Any) -> str:
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(resolved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(resolved, markdown[end:])])
