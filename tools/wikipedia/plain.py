"""Conversion of wikitext to plain text with mwparserfromhell.

The parser is MIT-licensed and written in C, opens no connections, and limits nesting and time. Only
prose remains: links become their labels, and headings become lines. Templates, tables, references,
images, categories and comments are dropped.
"""

from __future__ import annotations

import re
from collections import Counter
from types import ModuleType
from typing import Any

from megatron.errors import ConfigError
from tools.wikipedia.dump import Site

# Tags whose contents are not prose. Contents of other tags (bold, small, ...) are kept.
_DROPPED = frozenset(
    """
    table ref references gallery math chem ce timeline score graph imagemap hiero syntaxhighlight
    source templatedata mapframe maplink inputbox categorytree indicator section style
    """.split()
)
# Prefixes of links to the same article in other languages, which occur in older dumps.
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z]+)*|simple")
_SPACES = re.compile(r"[ \t\u00a0]+")
_LINES = re.compile(r"\n{3,}")
_SWITCH = re.compile(r"__[A-Z]+__")  # such as __NOTOC__
# Remains of templates: empty brackets, and spaces or separators next to them.
_EMPTY = re.compile(r"\([\s,;:]*\)")
_OPENED = re.compile(r"\(\s*[,;]\s*")
_SPACED = re.compile(r" +([,.])(?=\s|$)")
_STYLE = re.compile(r"'{2,}")  # bold and italic
_REFERENCE = re.compile(r"<ref\b[^<>]*>", re.IGNORECASE), re.compile(r"</ref\s*>", re.IGNORECASE)
_COMMENT = re.compile("<!--"), re.compile("-->")
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")  # an innermost template
# A "<" that does not begin a tag, and all marks that open or close an element.
_LESS = re.compile(r"<(?!/?[a-zA-Z][^<>]*>)")
_MARK = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|<(/?)([a-zA-Z]\w*)[^<>]*>")
_ENDS = {"]]": "[[", "}}": "{{", "|}": "{|"}
_WITHOUT_END = frozenset("br hr wbr img li p dt dd td th tr".split())
_MAX_UNCLOSED = 100  # limit per page; 4000 times "<ref " would take the parser seven seconds
# Replaces a template, so that ''{{a}}'' does not become four apostrophes in a row.
_PLACEHOLDER = "\ue000"
_MAX_DEPTH = 40  # nesting of templates; MediaWiki has the same limit


def parser() -> ModuleType:
    """Import and return mwparserfromhell.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        import mwparserfromhell
    except ImportError as error:
        raise ConfigError(
            f'extracting articles needs mwparserfromhell ({error}): run pip install -e ".[corpora]"'
        ) from None
    return mwparserfromhell


def plain_text(wikitext: str, site: Site) -> str:
    """Convert the wikitext of an article to plain text.

    Args:
        wikitext: The text of the page.
        site: The wiki, whose namespace names identify images and categories.

    Raises:
        ValueError: The parser cannot read the page or would take too long.
    """
    library = parser()
    try:
        pieces: list[str] = []
        text = _LESS.sub("&lt;", _shortened(wikitext))
        if _unclosed(text) > _MAX_UNCLOSED:
            raise ValueError(f"more than {_MAX_UNCLOSED} links, tables or tags are not closed")
        code = library.parse(text, skip_style_tags=True)
        _collect(code, site, pieces, library.nodes)
    except (library.parser.ParserError, RecursionError) as error:
        raise ValueError(str(error)) from error
    text = _STYLE.sub(_apostrophes, _SWITCH.sub("", "".join(pieces)))
    text = text.replace(_PLACEHOLDER, "")
    text = _SPACES.sub(" ", _OPENED.sub("(", _EMPTY.sub("", text)))
    lines = [_SPACED.sub(r"\1", line).strip() for line in text.split("\n")]
    return _LINES.sub("\n\n", "\n".join(lines)).strip()


def _shortened(wikitext: str) -> str:
    """Return wikitext without comments, references and templates.

    Otherwise, the parser would create objects for all their parts, which takes twice as long. The
    time of this step depends only on the length of the text.
    """
    for opening, closing in (_COMMENT, _REFERENCE):
        wikitext = _without(wikitext, opening, closing)
    for _ in range(_MAX_DEPTH):
        wikitext, count = _TEMPLATE.subn(_PLACEHOLDER, wikitext)
        if not count:
            break
    return wikitext


def _without(text: str, opening: re.Pattern[str], closing: re.Pattern[str]) -> str:
    pieces, position = list[str](), 0
    while (start := opening.search(text, position)) is not None:
        end: re.Match[str] | None = start
        if not start.group().endswith("/>"):
            end = closing.search(text, start.end())
        if end is None:
            break  # nothing ends after this point
        pieces.append(text[position : start.start()])
        position = end.end()
    return "".join([*pieces, text[position:]])


def _unclosed(wikitext: str) -> int:
    """Count the links, templates, tables and tags that are not closed."""
    depths = Counter[str]()
    for mark in _MARK.finditer(wikitext):
        slash, name = mark.groups()
        text = mark.group()
        if name is None:
            kind, step = _ENDS.get(text, text), -1 if text in _ENDS else 1
        else:
            kind, step = name.lower(), -1 if slash else 1
            if kind in _WITHOUT_END or text.endswith("/>"):
                continue
        depths[kind] = max(0, depths[kind] + step)
    return depths.total()


def _apostrophes(apostrophes: re.Match[str]) -> str:
    """Return the apostrophes of a run that are not markup: one of four, or all after the fifth."""
    length = len(apostrophes.group())
    return "'" if length == 4 else "'" * (length - 5)


def _collect(code: Any, site: Site, pieces: list[str], nodes: Any) -> None:
    """Append the prose of parsed wikitext to `pieces`."""
    for node in code.nodes:
        match node:
            case nodes.Text():
                pieces.append(node.value)
            case nodes.Wikilink():
                title = str(node.title).strip()
                namespace, colon, _ = title.partition(":")
                # Links that show a file or name a category of the article are not prose.
                is_prose = namespace.strip().lower() not in site.media
                if is_prose and node.text is not None:
                    _collect(node.text, site, pieces, nodes)
                elif is_prose and not (colon and _LANGUAGE.fullmatch(namespace)):
                    pieces.append(title.removeprefix(":"))
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
