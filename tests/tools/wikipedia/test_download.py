"""Downloads from a local server: verified, resumed, and refused."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError, StorageError
from tests.tools.wikipedia.toy import Mirror, mirror_of, serving
from tools.wikipedia import download
from tools.wikipedia.download import Checksum, Source, find_dump

DATA = bytes(range(256)) * 40_000  # 10 MB, several blocks
NAME = "eowiki-20261101-pages-articles.xml.bz2"
PATH = f"/eowiki/20261101/{NAME}"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the pauses between attempts."""
    monkeypatch.setattr(time, "sleep", lambda _: None)


@pytest.fixture
def mirror() -> Mirror:
    return mirror_of("eo", "20261101", DATA)


def _main(url: str, folder: Path, *more: str) -> int:
    return download.main(["--wiki", "eo", "--url", url, "--output", str(folder), *more])


def test_the_newest_dump_is_found_and_verified(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(mirror) as url:
        assert _main(url, tmp_path) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path / NAME)
        assert (tmp_path / NAME).read_bytes() == DATA
        asked = len(mirror.asked)
        assert _main(url, tmp_path, "--date", "20261101") == 0  # only the list is read again
        assert len(mirror.asked) == asked + 1
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_a_broken_connection_continues_where_it_ended(mirror: Mirror, tmp_path: Path) -> None:
    mirror.breaks_after = [3_000_000, 0, 2_000_000, 0, 0, 0]
    with serving(mirror) as url:
        assert _main(url, tmp_path) == 0
    assert (tmp_path / NAME).read_bytes() == DATA
    ranges = [asked for path, asked in mirror.asked if path == PATH]
    assert ranges[:2] == ["", "bytes=3000000-"]
    assert len(ranges) == 7


def test_a_part_of_an_earlier_run_is_kept(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA[:7_654_321])
    with serving(mirror) as url:
        assert _main(url, tmp_path) == 0
    assert (tmp_path / NAME).read_bytes() == DATA
    assert (PATH, "bytes=7654321-") in mirror.asked


def test_a_complete_part_needs_only_its_name(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA)
    with serving(mirror) as url:
        assert _main(url, tmp_path) == 0
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_part_that_is_too_long_begins_anew(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(DATA + b"x")
    with serving(mirror) as url:
        assert _main(url, tmp_path) == 0
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_server_without_ranges_sends_everything(mirror: Mirror, tmp_path: Path) -> None:
    mirror.ranges, mirror.breaks_after = False, [5_000_000]
    with serving(mirror) as url:
        assert _main(url, tmp_path) == 0
    assert (tmp_path / NAME).read_bytes() == DATA


@pytest.mark.parametrize("obeys", [True, False])
@pytest.mark.parametrize("versions", ["ETag", "Last-Modified", ""])
@pytest.mark.parametrize("is_longer", [True, False])
def test_two_versions_of_a_file_are_not_mixed(
    mirror: Mirror, tmp_path: Path, versions: str, obeys: bool, is_longer: bool
) -> None:
    mirror.versions, mirror.obeys, mirror.breaks_after = versions, obeys, [5_000_000]
    mirror.later = {PATH: bytes(len(DATA) + 5) if is_longer else bytes(4_000_000)}
    with serving(mirror) as url:
        assert _main(url + PATH, tmp_path) == 0  # no checksum is known
    assert (tmp_path / NAME).read_bytes() == mirror.later[PATH]
    assert [file.name for file in tmp_path.iterdir()] == [NAME]


def test_a_kill_leaves_the_version_of_the_part(mirror: Mirror, tmp_path: Path) -> None:
    mirror.breaks_after = [1_000_000] + [0] * 20
    with serving(mirror) as url:
        assert _main(url + PATH, tmp_path) == DataError.exit_code
        mirror.breaks_after = []
        assert _main(url + PATH, tmp_path) == 0
        assert mirror.asked[-1] == (PATH, "bytes=1000000-")
        (tmp_path / NAME).unlink()
        (tmp_path / f"{NAME}.part").write_bytes(b"of an unknown version")
        assert _main(url + PATH, tmp_path) == 0
        assert mirror.asked[-1] == (PATH, "")
    assert (tmp_path / NAME).read_bytes() == DATA


def test_a_connection_that_brings_nothing_is_given_up(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.breaks_after = [1_000_000] + [0] * 20
    with serving(mirror) as url:
        assert _main(url, tmp_path) == DataError.exit_code
    said = capsys.readouterr().err
    assert "cannot be downloaded" in said
    assert "run the same command again, which continues where this one ended" in said
    assert (tmp_path / f"{NAME}.part").stat().st_size == 1_000_000
    assert not (tmp_path / NAME).exists()


def test_wrong_bytes_never_get_the_name(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.files[PATH] = DATA[:-1] + b"!"
    with serving(mirror) as url:
        assert _main(url, tmp_path) == DataError.exit_code
    assert "the sha1 of the download is" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_md5_where_there_is_no_sha1(mirror: Mirror, tmp_path: Path) -> None:
    for path in [path for path in mirror.files if "sha1sums" in path]:
        del mirror.files[path]
    digest = "0" * 32
    mirror.files["/eowiki/latest/eowiki-latest-md5sums.txt"] = f"{digest}  {NAME}\n".encode()
    with serving(mirror) as url:
        assert find_dump("eo", "latest", url) == Source(url + PATH, Checksum("md5", digest))


def test_what_is_not_there_is_reported(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(mirror) as url:
        assert _main(url, tmp_path, "--date", "20250101") == DataError.exit_code
        assert "20250101-sha1sums.txt: the server answers 404" in capsys.readouterr().err
        mirror.files["/eowiki/latest/eowiki-latest-sha1sums.txt"] = b"0 other\n"
        assert _main(url, tmp_path) == DataError.exit_code
        assert "does not list eowiki-...-pages-articles.xml.bz2 yet" in capsys.readouterr().err
        assert _main(url + "/eowiki/x.xml.bz2", tmp_path) == DataError.exit_code
        assert "x.xml.bz2: the server answers 404" in capsys.readouterr().err


def test_no_network_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert _main(f"http://127.0.0.1:{port}", tmp_path) == DataError.exit_code
    said = capsys.readouterr().err.strip()
    assert "Connection refused" in said
    assert "check the network" in said
    assert len(said.splitlines()) == 1


def test_a_file_on_this_machine_is_used_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.xml.bz2").write_bytes(b"")
    assert _main(str(tmp_path / "a.xml.bz2"), tmp_path / "out") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.xml.bz2")
    assert _main("ftp://example.org/a.xml.bz2", tmp_path) == ConfigError.exit_code
    assert "neither http(s)://... nor an existing file" in capsys.readouterr().err


def test_a_given_checksum_counts(mirror: Mirror, tmp_path: Path) -> None:
    with serving(mirror) as url:
        assert _main(url + PATH, tmp_path, "--checksum", f"md5:{'0' * 32}") == DataError.exit_code
        assert not list(tmp_path.iterdir())
        assert _main(url + PATH, tmp_path) == 0  # without a checksum, it says so


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--wiki", "../etc"], "--wiki ../etc: expected a language"),
        (["--date", "today"], "--date today: expected YYYYMMDD"),
        (["--checksum", "sha1:12"], "--checksum sha1:12: expected sha1:"),
        (["--checksum", "crc:"], "--checksum crc:: expected sha1:"),
    ],
)
def test_flags_are_checked_first(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download.main([*words, "--output", str(tmp_path)]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_reported_first(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 9}))
    with serving(mirror) as url, pytest.raises(StorageError, match="only 9 are free"):
        download.download(find_dump("eo", "latest", url), tmp_path)
