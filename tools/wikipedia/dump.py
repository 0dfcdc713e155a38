"""A reader of the articles in a MediaWiki dump: XML, possibly compressed, page by page.

Memory use is bounded: only the pages of one block of XML are in memory at a time, and the text of a
page that is too long is discarded. A dump may come from anywhere, so document type definitions,
which could expand to any size, are rejected.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit
from xml.parsers import expat

from megatron.errors import DataError

LONGEST = 8 << 20  # maximum number of characters of a page; MediaWiki allows 2 MiB
_READ = 1 << 20  # bytes of XML at a time
_FILE, _CATEGORY = "6", "14"  # keys of namespaces
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".bz2": bz2.BZ2File,
    ".gz": gzip.GzipFile,
    ".xz": lzma.LZMAFile,
    ".xml": lambda path: path.open("rb"),
}
SUFFIXES = tuple(_OPENERS)


class Site(NamedTuple):
    """The wiki that a dump comes from.

    Attributes:
        articles: Address of articles without the title, ending with a slash.
        media: Names of the namespaces of files and categories, in lower case.
    """

    articles: str
    media: frozenset[str]

    def url(self, title: str) -> str:
        """Return the address of an article."""
        return self.articles + quote(title.replace(" ", "_"), safe="/:()',!*@$;~")


class Page(NamedTuple):
    """An article.

    Attributes:
        id: The id of the page in the wiki.
        title: The title.
        text: The wikitext, or `None` if it is longer than `LONGEST`.
    """

    id: str
    title: str
    text: str | None


def read_pages(path: Path) -> Iterator[tuple[Site, Page]]:
    """Yield the articles of a dump in order, without redirects and other pages.

    Raises:
        DataError: The file cannot be read, is truncated or damaged, or is not a dump.
    """
    opener = _OPENERS.get(path.suffix)
    if opener is None:
        raise DataError(f"{path}: expected a dump whose name ends in {', '.join(SUFFIXES)}")
    reader, finished = _Reader(), False
    remedy = "download it again (tools/wikipedia/download.py)"
    try:
        with opener(path) as file:
            while not finished:
                block = file.read(_READ)
                finished = not block
                reader.feed(block)
                if reader.pages:
                    assert reader.site is not None
                    yield from ((reader.site, page) for page in reader.pages)
                    reader.pages.clear()
    except EOFError:
        raise DataError(f"{path}: the file is truncated: {remedy}") from None
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise DataError(f"{path}: line {error.lineno}: broken XML ({problem}): {remedy}") from None
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (OSError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason}): {remedy}") from error


class _Reader:
    """An XML parser that collects complete articles in `pages`."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.site: Site | None = None
        self._open: list[str] = []
        self._page: dict[str, str | None] = {}
        self._base, self._media = "", {"file", "image", "category"}
        self._is_media_namespace = False
        self._text: list[str] = []
        self._length = 0
        self._parser = expat.ParserCreate(namespace_separator=" ")
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._characters
        self._parser.StartDoctypeDeclHandler = self._refuse

    def feed(self, block: bytes) -> None:
        """Parse a block of the file. An empty block ends the file."""
        self._parser.Parse(block, not block)

    def _refuse(self, *_: object) -> None:
        raise DataError("it has a document type definition: expected a dump without one")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        name = name.rpartition(" ")[2]
        if not self._open and name != "mediawiki":
            raise DataError(f"the first element is <{name}>: expected a dump (<mediawiki>)")
        self._open.append(name)
        self._text, self._length = [], 0
        if name == "page":
            self._page = {}
        elif name == "redirect":
            self._page["redirect"] = ""
        elif name == "namespace":
            self._is_media_namespace = attributes.get("key") in (_FILE, _CATEGORY)

    def _characters(self, data: str) -> None:
        if self._length <= LONGEST:
            self._text.append(data)
        self._length += len(data)

    def _end(self, name: str) -> None:
        name = self._open.pop()
        text = "".join(self._text) if self._length <= LONGEST else None
        self._text, self._length = [], 0
        match self._open[-1:], name:
            case ["page"], "title" | "ns" | "id":
                self._page[name] = text
            case ["revision"], "text":
                self._page["text"] = text
            case ["siteinfo"], "base":
                self._base = text or ""
            case ["namespaces"], "namespace" if self._is_media_namespace:
                self._media.add((text or "").lower())
            case ["mediawiki"], "siteinfo":
                address = urlsplit(self._base)
                folder = address.path.rpartition("/")[0]
                articles = f"{address.scheme}://{address.netloc}{folder}/"
                self.site = Site(articles, frozenset(self._media))
            case ["mediawiki"], "page":
                if self.site is None:
                    raise DataError(
                        "<siteinfo> is missing before the first page: the dump is incomplete"
                    )
                page = self._page
                title, page_id = page.get("title"), page.get("id")
                is_article = page.get("ns") == "0" and "redirect" not in page
                # A title or text that was deleted is missing.
                if is_article and title and page_id and "text" in page:
                    self.pages.append(Page(page_id, title, page["text"]))
