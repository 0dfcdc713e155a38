"""A small MediaWiki dump, and a local server of dumps."""

from __future__ import annotations

import bz2
import contextlib
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

BASE = "https://eo.wikipedia.org/wiki/%C4%88efpa%C4%9Do"
SITE = f"""<siteinfo><sitename>Vikipedio</sitename><base>{BASE}</base><namespaces>
<namespace key="0" case="first-letter" />
<namespace key="6" case="first-letter">Dosiero</namespace>
<namespace key="14" case="first-letter">Kategorio</namespace>
</namespaces></siteinfo>
"""
ROOT_TAG = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">\n'
WORDS = "La pomo estas frukto de arbo kiu kreskas en multaj landoj kaj havas dolĉan guston".split()


def page(number: int, title: str, text: str, *, space: int = 0, redirect: str = "") -> str:
    """Return a page in the format of dumps."""
    turn = f'<redirect title="{redirect}" />' if redirect else ""
    return (
        f"<page><title>{escape(title)}</title><ns>{space}</ns><id>{number}</id>{turn}"
        f"<revision><id>{number + 900}</id><contributor><username>A</username><id>7</id>"
        f'</contributor><text xml:space="preserve">{escape(text)}</text></revision></page>\n'
    )


def article(number: int, words: int = 60) -> str:
    """Return wikitext with a heading, a link, a template and a reference."""
    run = [WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(words)]
    run[3] = f"[[Pomo {number}|{run[3]}]]"
    run[5] += "<ref>{{citaĵo|titolo=x}}</ref>"
    half = len(run) // 2
    return f"{{{{Informkesto}}}}\n{' '.join(run[:half])}\n== Historio ==\n{' '.join(run[half:])}\n"


def dump(pages: list[str]) -> bytes:
    """Return the XML of a dump."""
    return (ROOT_TAG + SITE + "".join(pages) + "</mediawiki>\n").encode()


def articles(count: int, words: int = 60) -> list[str]:
    """Return articles with pages in between that are not articles."""
    pages = [page(i + 1, f"Artikolo {i}", article(i, words)) for i in range(count)]
    pages.insert(1, page(9001, "Diskuto:Artikolo 0", "Saluton", space=1))
    pages.insert(2, page(9002, "Alia nomo", "#REDIRECT [[Artikolo 0]]", redirect="Artikolo 0"))
    pages.insert(3, page(9003, "Malplena", "{{nur ŝablono}}"))
    return pages


def write_dump(path: Path, pages: list[str]) -> Path:
    """Write a compressed dump."""
    path.write_bytes(bz2.compress(dump(pages)))
    return path


class Mirror:
    """The files on a server, and how it fails.

    Attributes:
        files: Contents by path.
        breaks_after: The number of bytes after which the connection closes, for each of the first
            answers.
        ranges: Whether it supports Range.
        versions: The header with a file's version: "ETag", "Last-Modified" or "".
        obeys: Whether it supports If-Range.
        later: Contents by path after the first broken answer.
        asked: The requested ranges, by path.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.breaks_after: list[int] = []
        self.ranges = True
        self.versions = "ETag"
        self.obeys = True
        self.later: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []


def mirror_of(wiki: str, day: str, data: bytes) -> Mirror:
    """Return a mirror with one dump, structured like Wikimedia's."""
    name = f"{wiki}wiki-{day}-pages-articles.xml.bz2"
    digest = hashlib.sha1(data).hexdigest()
    listed = f"{'0' * 40}  {wiki}wiki-{day}-other.sql.gz\n{digest}  {name}\n".encode()
    folder = f"/{wiki}wiki"
    return Mirror(
        {
            f"{folder}/{day}/{name}": data,
            f"{folder}/latest/{wiki}wiki-latest-sha1sums.txt": listed,
            f"{folder}/{day}/{wiki}wiki-{day}-sha1sums.txt": listed,
        }
    )


@contextlib.contextmanager
def serving(mirror: Mirror) -> Iterator[str]:
    """Serve a mirror on this machine, and yield its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range", "")
            mirror.asked.append((self.path, asked))
            data = mirror.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            digest = hashlib.sha1(data).hexdigest()
            version = f'"{digest}"' if mirror.versions == "ETag" else f"Mon, {digest[:9]} GMT"
            if mirror.obeys and self.headers.get("If-Range", version) != version:
                asked = ""
            first = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if asked and mirror.ranges and first >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if asked and mirror.ranges:
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
                data = data[first:]
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            if mirror.versions:
                self.send_header(mirror.versions, version)
            self.end_headers()
            is_dump = self.path.endswith(".bz2")
            broken = mirror.breaks_after.pop(0) if is_dump and mirror.breaks_after else len(data)
            self.wfile.write(data[:broken])
            if broken < len(data):
                mirror.files.update(mirror.later)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
