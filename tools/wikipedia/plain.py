"""Wikitext to plain text, by mwparserfromhell.

The parser is MIT-licensed, written in C, opens no connections and bounds nesting and time. What
remains is prose: links become their labels, and headings become lines; templates, tables,
references, images, categories and comments are dropped.
"""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

from megatron.errors import ConfigError
from tools.wikipedia.dump import Site

# Tags whose contents are not prose. Those of other tags (bold, small, blockquote, ...) are kept.
_DROPPED = frozenset(
    """
    table ref references gallery math chem ce timeline score graph imagemap hiero syntaxhighlight
    source templatedata mapframe maplink inputbox categorytree indicator section style
    """.split()
)
# Links to the same article in other languages, as older dumps have them.
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*|simple")
_SPACES = re.compile(r"[ \t\u00a0]+")
_LINES = re.compile(r"\n{3,}")
_SWITCH = re.compile(r"__[A-Z]+__")  # __NOTOC__ and its like
_EMPTY = re.compile(r"\(\s*[,;:]?\s*\)")  # brackets whose templates have gone


def parser() -> ModuleType:
    """Return the module mwparserfromhell.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import mwparserfromhell
    except ImportError as error:
        raise ConfigError(
            f'extracting articles needs mwparserfromhell ({error}): run pip install -e ".[corpora]"'
        ) from None
    return mwparserfromhell


def plain_text(wikitext: str, site: Site) -> str:
    """Return an article as plain text.

    Args:
        wikitext: The text of the page.
        site: The wiki, whose names of namespaces identify images and categories.

    Raises:
        ValueError: The parser cannot read the page.
    """
    library = parser()
    try:
        pieces: list[str] = []
        _collect(library.parse(wikitext), site, pieces, library.nodes)
    except (library.parser.ParserError, RecursionError) as error:
        raise ValueError(str(error)) from error
    text = _EMPTY.sub("", _SWITCH.sub("", "".join(pieces)))
    lines = [_SPACES.sub(" ", line).strip() for line in text.split("\n")]
    return _LINES.sub("\n\n", "\n".join(lines)).strip()


def _collect(code: Any, site: Site, pieces: list[str], nodes: Any) -> None:
    """Append the prose of parsed wikitext."""
    for node in code.nodes:
        match node:
            case nodes.Text():
                pieces.append(node.value)
            case nodes.Wikilink():
                if node.text is None:
                    pieces.append(_title(str(node.title).strip(), site))
                elif not _is_media(str(node.title), site):
                    _collect(node.text, site, pieces, nodes)
            case nodes.Heading():
                pieces.append("\n\n")
                _collect(node.title, site, pieces, nodes)
                pieces.append("\n\n")
            case nodes.HTMLEntity():
                pieces.append(node.normalize())
            case nodes.ExternalLink():
                if node.title is not None:
                    _collect(node.title, site, pieces, nodes)
            case nodes.Tag():
                name = str(node.tag).strip().lower()
                if name in ("br", "hr"):
                    pieces.append("\n")
                elif node.contents is not None and name not in _DROPPED:
                    _collect(node.contents, site, pieces, nodes)


def _is_media(title: str, site: Site) -> bool:
    """Return whether a link shows a file or names a category of the article."""
    return title.partition(":")[0].strip().lower() in site.media


def _title(title: str, site: Site) -> str:
    """Return what a link without a label shows, if anything."""
    namespace, colon, _ = title.partition(":")
    if _is_media(title, site) or (colon and _LANGUAGE.fullmatch(namespace)):
        return ""
    return title.removeprefix(":")
