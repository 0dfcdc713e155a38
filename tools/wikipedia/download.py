"""Download and verify the articles of a Wikipedia in any language.

    python tools/wikipedia/download.py --wiki simple --output dumps

To continue an interrupted download, give the same command again. The file gets its final name, for
example dumps/simplewiki-20261101-pages-articles.xml.bz2, once its checksum matches the dump's own
list.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megatron import durable
from megatron.command import run_command
from megatron.config.arguments import ToolParser
from megatron.errors import ConfigError, DataError, StorageError

DUMPS = "https://dumps.wikimedia.org"
_ATTEMPTS = 5  # consecutive attempts without new data
_SECONDS = 60  # seconds without data after which a connection is closed
_BLOCK = 1 << 20
_LIST_BYTES = 16 << 20  # the longest list of checksums to read
_ALGORITHMS = {"sha1": 40, "md5": 32, "sha256": 64}  # with their numbers of hexadecimal digits
_AGENT = {"User-Agent": "megatron-corpora/1 (tools/wikipedia/download.py)"}


class Checksum(NamedTuple):
    """The expected checksum of a file.

    Attributes:
        algorithm: "sha1", "md5" or "sha256".
        digest: The hexadecimal digits, in lower case.
    """

    algorithm: str
    digest: str

    @classmethod
    def read(cls, text: str) -> Checksum:
        """Parse a checksum that a user gave as ALGORITHM:DIGITS.

        Raises:
            ConfigError: The text is not a checksum.
        """
        algorithm, _, digest = text.lower().partition(":")
        if not re.fullmatch(f"[0-9a-f]{{{_ALGORITHMS.get(algorithm, 0)}}}", digest) or not digest:
            names = ", ".join(f"{name}:..." for name in _ALGORITHMS)
            raise ConfigError(f"--checksum {text}: expected {names} with all hexadecimal digits")
        return cls(algorithm, digest)


class AbsentError(DataError, exit_code=DataError.exit_code):
    """The server does not have the requested file, or refuses to send it."""


class Source(NamedTuple):
    """A file to download.

    Attributes:
        url: The address of the file.
        checksum: The expected checksum, or `None` if unknown.
    """

    url: str
    checksum: Checksum | None

    @property
    def name(self) -> str:
        """The name of the file."""
        return urllib.parse.unquote(urllib.parse.urlsplit(self.url).path).rpartition("/")[2]


def find_dump(wiki: str, date: str, mirror: str = DUMPS) -> Source:
    """Return the newest dump of a Wikipedia, or the dump of a given date, with its checksum.

    Args:
        wiki: The language, as in the address: "simple", "en", "zh-yue".
        date: The date of the dump as YYYYMMDD, or "latest".
        mirror: Address of the folder that contains a folder for each wiki.

    Raises:
        ConfigError: The language or date is malformed.
        DataError: There is no such dump, or the network fails.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,40}", wiki):
        raise ConfigError(f"--wiki {wiki}: expected a language such as simple, en or zh-yue")
    if not re.fullmatch(r"latest|\d{8}", date):
        raise ConfigError(f"--date {date}: expected YYYYMMDD or latest")
    name = wiki.replace("-", "_") + "wiki"
    folder = f"{mirror.rstrip('/')}/{name}"
    problems = []
    for algorithm in ("sha1", "md5"):
        address = f"{folder}/{date}/{name}-{date}-{algorithm}sums.txt"
        try:
            listing = _read_list(address)
        except AbsentError as error:
            problems.append(str(error))
            continue
        digits = _ALGORITHMS[algorithm]
        pattern = rf"(?m)^([0-9a-f]{{{digits}}})\s+({name}-(\d{{8}})-pages-articles\.xml\.bz2)$"
        match = re.search(pattern, listing)
        if match is not None:
            digest, file, day = match.groups()
            return Source(f"{folder}/{day}/{file}", Checksum(algorithm, digest))
        problems.append(f"{address} does not list {name}-...-pages-articles.xml.bz2 yet")
    raise DataError(
        f"--wiki {wiki} --date {date}: {problems[0]}: choose another --wiki or --date, or give "
        "--url with a mirror or a file"
    )


def _open(url: str, offset: int = 0, version: str = "") -> http.client.HTTPResponse:
    """Request a file, beginning at byte `offset` if the file still has the given version.

    A server that has a different version or does not support ranges sends the whole file.

    Raises:
        OSError: The network fails, or the server refuses the request.
    """
    headers = {**_AGENT, **({"Range": f"bytes={offset}-"} if offset else {})}
    if offset and version:
        headers["If-Range"] = version
    request = urllib.request.Request(url, headers=headers)
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_SECONDS)
    return response


def _read_list(url: str) -> str:
    for attempt in range(_ATTEMPTS):
        try:
            with _open(url) as response:
                return response.read(_LIST_BYTES).decode("ascii", "replace")
        except (OSError, http.client.HTTPException) as error:
            _wait_or_raise(url, error, attempt)
    raise AssertionError("the last attempt raises")


def _wait_or_raise(url: str, error: Exception, attempt: int) -> None:
    """Wait before the next attempt, or raise an error if another attempt would be useless.

    Raises:
        AbsentError: The file does not exist, or the server refuses to send it.
        DataError: This was the last attempt.
    """
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code < 500 and error.code != 429:
            raise AbsentError(f"{url}: the server answers {error.code} {error.reason}") from error
    if attempt + 1 == _ATTEMPTS:
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url}: cannot be downloaded ({reason}): check the network and run the same command "
            "again, which continues where this one ended; or give --url with a mirror or a file"
        ) from error
    time.sleep(min(30, 0.5 * 2**attempt))


def download(source: Source, folder: Path, *, show_progress: bool = True) -> Path:
    """Download a file, or continue an earlier download, and return the path.

    Args:
        source: The address of the file, and its checksum if known.
        folder: The folder to write to.
        show_progress: Whether to show the progress on a terminal.

    Raises:
        DataError: The network fails, or the file does not match its checksum.
        StorageError: The folder cannot be written.
    """
    path = folder / source.name
    if path.exists():  # its checksum was verified before it got this name
        return path
    part = folder / f"{source.name}.part"
    with durable.writing_to("--output", folder):
        folder.mkdir(parents=True, exist_ok=True)
        part.touch()
    attempt = 0
    while True:
        before = part.stat().st_size
        try:
            if _fetch_rest(source, part, show_progress=show_progress):
                break
            error: Exception = ConnectionError("the connection was closed early")
        except (OSError, http.client.HTTPException) as caught:
            error = caught
        attempt = 0 if part.stat().st_size > before else attempt
        _wait_or_raise(source.url, error, attempt)
        attempt += 1
    _verify(source, part)
    with durable.writing_to("--output", folder):
        _version_file(part).unlink(missing_ok=True)
        part.rename(path)
        durable.sync_folder(folder)
    return path


def _version_file(part: Path) -> Path:
    """Return the path of the file that records the version of a partial download."""
    return part.with_name(f"{part.name}.version")


def _fetch_rest(source: Source, part: Path, *, show_progress: bool) -> bool:
    """Append the missing data to a file, and return whether the file is now complete.

    If the file on the server has changed since the download began, or if that cannot be determined,
    the download starts over.

    Raises:
        OSError: The network fails.
        StorageError: The file cannot be written.
    """
    from tqdm import tqdm

    version_file = _version_file(part)
    version = version_file.read_text() if version_file.exists() else ""
    offset = part.stat().st_size if version or source.checksum is not None else 0
    try:
        response = _open(source.url, offset, version)
    except urllib.error.HTTPError as error:
        complete = error.headers.get("Content-Range", "") == f"bytes */{offset}"
        if error.code != 416:
            raise
        error.close()
        if not complete:  # the part is longer, so it is from another version
            part.write_bytes(b"")
            raise ConnectionError("the file on the server has changed") from None
        return True
    with response:
        length = int(response.headers.get("Content-Length") or 0)
        start = f"bytes {offset}-"
        is_continued = response.status == 206 and response.headers.get(
            "Content-Range", ""
        ).startswith(start)
        # A file's version is its strong ETag or its modification time.
        etag = response.headers.get("ETag", "")
        current_version = (
            etag if etag.startswith('"') else str(response.headers.get("Last-Modified", ""))
        )
        if response.status == 206 and (
            not is_continued or (version and current_version and current_version != version)
        ):
            part.write_bytes(b"")  # the server does not support If-Range
            raise ConnectionError("the file on the server has changed")
        if not is_continued:
            offset = 0  # the server sends everything
        with durable.writing_to("--output", part):
            free = shutil.disk_usage(part.parent).free
            if length > free:
                raise StorageError(f"{length:,} bytes are missing, but only {free:,} are free")
            file = part.open("ab" if is_continued else "wb")
            if not is_continued:  # the part is empty now, so a kill cannot mix versions
                durable.replace_file(version_file, current_version.encode())
        total = offset + length if length else None
        bar = tqdm(
            total=total, initial=offset, unit="B", unit_scale=True, disable=not show_progress
        )
        with file, bar:
            bar.set_description(part.name.removesuffix(".part"))
            while block := response.read(_BLOCK):
                with durable.writing_to("--output", part):
                    file.write(block)
                bar.update(len(block))
    return not length or part.stat().st_size == offset + length


def _verify(source: Source, part: Path) -> None:
    if source.checksum is None:
        print(f"{source.name}: no checksum is known, so it was not verified", flush=True)
        return
    algorithm, expected = source.checksum
    with part.open("rb") as file:
        actual = hashlib.file_digest(file, algorithm).hexdigest()
    if actual != expected:
        with suppress(OSError):
            part.unlink()
            _version_file(part).unlink(missing_ok=True)
        raise DataError(
            f"{source.url}: the {algorithm} of the download is {actual}, but it should be "
            f"{expected}: the file was removed; run the same command again"
        )


def locate(options: argparse.Namespace) -> Path | Source:
    """Return the local file or the download that the flags name.

    Raises:
        ConfigError: --url is neither an address nor a file.
        DataError: There is no such dump, or the network fails.
    """
    checksum = None if options.checksum is None else Checksum.read(options.checksum)
    url = options.url
    if url is None or (_is_address(url) and not url.endswith((".bz2", ".xml", ".gz", ".xz"))):
        source = find_dump(options.wiki, options.date, url or DUMPS)
        return source if checksum is None else source._replace(checksum=checksum)
    if _is_address(url):
        return Source(url, checksum)
    path = Path(url.removeprefix("file://"))
    if not path.is_file():
        raise ConfigError(f"--url {url}: neither http(s)://... nor an existing file")
    return path


def _is_address(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the dump to download."""
    parser.add_argument(
        "--wiki",
        default="simple",
        metavar="LANGUAGE",
        help="Language, as in the Wikipedia's address: simple, en, de, zh-yue, ... (default: "
        "%(default)s).",
    )
    parser.add_argument(
        "--date",
        default="latest",
        metavar="YYYYMMDD",
        help="Date of the dump (default: %(default)s).",
    )
    parser.add_argument(
        "--url",
        help=f"Mirror to use instead of {DUMPS}, or the address or path of a dump.",
    )
    parser.add_argument(
        "--checksum",
        metavar="sha1:HEX",
        help="Checksum to use instead of the one in the dump's list (also md5:, sha256:).",
    )


def run(options: argparse.Namespace) -> None:
    """Download a dump, and print its path."""
    dump_or_source = locate(options)
    path = (
        dump_or_source
        if isinstance(dump_or_source, Path)
        else download(dump_or_source, options.output)
    )
    print(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = ToolParser("download.py", __doc__)
    add_source_flags(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="Folder to download into."
    )
    options = parser.read(argv)
    return run_command(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
