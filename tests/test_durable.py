"""Files that nobody else can have prepared, written or redirected."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron import durable
from megatron.errors import ConfigError, StorageError

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


@pytest.mark.parametrize("target", ["victim", "missing"])
def test_a_new_file_is_never_a_link(tmp_path: Path, victim: Path, target: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(FileExistsError):
        durable.create(link)
    with pytest.raises(FileExistsError), durable.new_file(link):
        pass
    assert victim.read_text() == "precious"
    assert not (tmp_path / "missing").exists()


def test_a_new_file_is_read_and_written_and_belongs_to_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with durable.create(tmp_path / "new") as file:
            file.write(b"text")
            file.seek(0)
            assert file.read() == b"text"
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644
    durable.open_trusted(tmp_path / "new").close()


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    names = {durable.unique_sibling(tmp_path / "x", ".tmp-").name for _ in range(1000)}
    assert len(names) == 1000
    assert not any(str(os.getpid()) == name.removeprefix("x.tmp-") for name in names)


def test_a_link_under_the_final_name_is_replaced_not_followed(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "final").symlink_to(victim)
    durable.replace_file(tmp_path / "final", b"new")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "final").is_symlink()
    assert (tmp_path / "final").read_bytes() == b"new"


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(path.parent):
        listening.bind(path.name)  # a longer name does not fit


def _foreign(path: Path) -> None:
    os.chown(path, 4321, 4321, follow_symlinks=False)


ATTACKS: list[Callable[[Path], None]] = [
    _link,
    _pipe,
    _folder,
    _socket,
    lambda path: path.chmod(0o646),
    lambda path: path.chmod(0o664),
    pytest.param(_foreign, marks=as_root),  # type: ignore[list-item]
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_others_may_have_written_is_not_opened(
    victim: Path, attack: Callable[[Path], None]
) -> None:
    with durable.open_trusted(victim) as file:
        assert file.read() == b"precious"
    attack(victim)
    with pytest.raises(OSError, match="victim"):
        durable.open_trusted(victim)


@as_root
def test_the_file_of_a_trusted_owner_is_opened(victim: Path) -> None:
    _foreign(victim)
    durable.open_trusted(victim, 4321).close()
    victim.chmod(0o666)
    with pytest.raises(PermissionError):
        durable.open_trusted(victim, 4321)


@as_root
def test_root_s_files_are_trusted_by_everybody(
    victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    durable.open_trusted(victim).close()


def test_a_private_folder_is_created_and_found_again(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = durable.private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700
    assert durable.private_folder(path) == path


@pytest.mark.parametrize(
    "attack",
    [
        _link,
        lambda path: path.chmod(0o777),
        lambda path: path.chmod(0o770),
        lambda path: path.chmod(0o755),
        pytest.param(_foreign, marks=as_root),
    ],
)
def test_a_folder_that_others_may_enter_is_refused(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    path = durable.private_folder(tmp_path / "private")
    attack(path)
    with pytest.raises(PermissionError, match="not a private folder of this user"):
        durable.private_folder(path)


def test_a_file_in_place_of_a_private_folder_is_refused(victim: Path) -> None:
    with pytest.raises(PermissionError):
        durable.private_folder(victim)


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with durable.atomic_file(path) as file:
            file.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    with durable.atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_new_file_and_the_folder_of_a_replaced_one_are_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, sizes = [], []

    def flush(number: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{number}"))
        sizes.append(os.fstat(number).st_size)

    monkeypatch.setattr(os, "fsync", flush)
    durable.replace_file(tmp_path / "file", b"new")
    assert sizes[0] == 3  # nothing is left in a buffer
    assert len(flushed) == 2
    assert flushed[0].startswith(f"{tmp_path / 'file'}{durable.TEMPORARY}")
    assert flushed[1] == str(tmp_path)


def test_no_descriptor_stays_open(tmp_path: Path, victim: Path) -> None:
    gc.collect()  # no file of an earlier test is closed in the meantime
    before = os.listdir("/proc/self/fd")
    durable.replace_file(tmp_path / "file", b"new")
    victim.chmod(0o666)
    with pytest.raises(PermissionError):
        durable.open_trusted(victim)
    victim.chmod(0o755)  # others may read and execute it
    durable.open_trusted(victim).close()
    assert os.listdir("/proc/self/fd") == before


def test_only_a_flag_replaces_what_exists(tmp_path: Path) -> None:
    link, missing = tmp_path / "link", tmp_path / "missing"
    link.symlink_to(missing)  # a link to nothing would be replaced, too
    durable.expect_no_file("--out", [missing], overwrite=False)
    durable.expect_no_file("--out", [missing, link], overwrite=True)
    with pytest.raises(ConfigError, match=f"--out: {link} already exists: .* --overwrite"):
        durable.expect_no_file("--out", [missing, link], overwrite=False)


def test_an_error_of_the_disk_names_the_flag_once(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    with pytest.raises(StorageError) as refusal, durable.writing_to("--out", tmp_path):
        inner.open()
    assert str(refusal.value) == (
        f"--out {tmp_path} cannot be written ({inner}: No such file or directory): free space, "
        "or give another path"
    )
    with (
        pytest.raises(StorageError) as again,
        durable.writing_to("--save", "folder"),
        durable.writing_to("--out", tmp_path),
    ):
        inner.open()
    assert str(again.value) == str(refusal.value)
    for code, remedy in (
        (errno.ENOSPC, "free space, or give another path"),
        (errno.EROFS, "make it writable, or give another path"),
        (errno.EACCES, "make it writable, or give another path"),
        (errno.EISDIR, "give another path"),
    ):
        with pytest.raises(StorageError) as refusal, durable.writing_to("--out", tmp_path):
            raise OSError(code, os.strerror(code), str(inner))
        assert str(refusal.value).endswith(f"({inner}: {os.strerror(code)}): {remedy}")


def test_an_error_without_a_name_or_number_is_still_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as refusal, durable.writing_to("--out", tmp_path / "a" / "b"):
        raise OSError("the library failed")
    path = tmp_path / "a" / "b"
    assert str(refusal.value) == (
        f"--out {path} cannot be written ({path}: the library failed): free space, or give "
        "another path"
    )
    with pytest.raises(StorageError, match="create the folder, or give another path$"):
        durable.check_writable("--out", path)
    with pytest.raises(StorageError, match=r"written \(.*File name too long\): give another path$"):
        durable.check_writable("--out", tmp_path / ("x" * 300))


def test_a_check_leaves_files_as_they_are(tmp_path: Path, victim: Path) -> None:
    for path in (victim, tmp_path / "new"):
        durable.check_writable("--out", path)
    assert victim.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [victim]
    durable.remove_tree(tmp_path / "none")
    (tmp_path / "tree" / "folder").mkdir(parents=True)
    durable.remove_tree(tmp_path / "tree")
    assert list(tmp_path.iterdir()) == [victim]
    with pytest.raises(NotADirectoryError):
        durable.sync_folder(victim)


@pytest.mark.parametrize(
    ("name", "is_good"), [("a.png", True), ("a.SVG", True), ("a.pdf", True), ("a.jpg", False)]
)
def test_plots_have_a_few_formats(name: str, is_good: bool) -> None:
    problems = durable.plot_name_problems("--out", Path(name))
    assert problems == (
        [] if is_good else [f"--out {name}: give a name that ends in .png, .pdf, .svg"]
    )


def test_a_folder_that_fails_its_check_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(durable, "sync_folder", flushed.append)
    temporary, final = tmp_path / "final.tmp-1", tmp_path / "final"
    temporary.mkdir()
    durable.check_unpublished(None, temporary, final)
    durable.check_unpublished(lambda folder: None, temporary, final)
    assert temporary.is_dir()

    def fail(folder: Path) -> None:
        assert folder == temporary
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        durable.check_unpublished(fail, temporary, final)
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("final.unverified-")
    assert flushed == [tmp_path]
    assert f"{final} was not verified: the unverified output is in {aside}" in (
        capsys.readouterr().err
    )
