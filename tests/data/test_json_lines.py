"""Files of JSON lines that programs continue: lines, positions, and the programs' settings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron.data import json_lines
from megatron.data.json_lines import JsonLine, json_object, read_objects, save_or_check_settings
from megatron.errors import DataError, StorageError


def test_lines_have_their_number_and_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xc3\xa9"}\n{"b": NaN}\n[1]\n')
    expected = [JsonLine(1, 0, {"a": 1}), JsonLine(2, 9, {"a": "é"})]
    assert [line[:2] for line in read_objects(path, "--x", 23)] == [(1, 0), (2, 9), (3, 21)]
    for end in (10, 20, 21):
        assert list(read_objects(path, "--x", end)) == expected
    assert list(read_objects(path, "--x", 9)) == expected[:1]
    assert list(read_objects(path, "--x", 0)) == []
    lines = read_objects(path, "--x")
    assert [next(lines).number for _ in range(3)] == [1, 2, 3]
    with pytest.raises(DataError, match=r"--x .*a.jsonl: line 4 is not a JSON object: fix or rem"):
        next(lines)
    with pytest.raises(DataError, match=r"--x .*none cannot be read \(No such file or directory"):
        list(read_objects(tmp_path / "none", "--x"))


def test_only_objects_are_objects() -> None:
    assert json_object(b'{"a": [1]}') == {"a": [1]}
    for data in (b"[1]", b"3", b"null", b"{", b"", b"\xff"):
        assert json_object(data) == {}


def test_a_line_may_be_as_long_as_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_MB", 1)
    path = tmp_path / "a.jsonl"
    for size, fits in ((1 << 20, True), ((1 << 20) + 1, False)):
        line = json.dumps({"a": "x" * (size - 10)}).encode() + b"\n"
        assert len(line) == size
        path.write_bytes(b'{"a": 1}\n' + line)
        if fits:
            assert [one.number for one in read_objects(path, "--x")] == [1, 2]
        else:
            with pytest.raises(DataError, match="line 2 is longer than 1 MiB: fix or remove"):
                list(read_objects(path, "--x"))


def test_settings_stay_those_of_the_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, saved = tmp_path / "out.jsonl", tmp_path / "out.jsonl.settings.json"
    settings = {"--seed": 1, "--top-p": 0.5}
    save_or_check_settings(path, settings, 0, "samples were drawn")
    assert not saved.exists()  # there is no file yet
    path.touch()
    save_or_check_settings(path, {"--seed": 7}, 0, "samples were drawn")
    save_or_check_settings(path, settings, 0, "samples were drawn")
    assert saved.read_text() == '{\n  "--seed": 1,\n  "--top-p": 0.5\n}\n'
    save_or_check_settings(path, settings, 3, "samples were drawn")
    assert capsys.readouterr().out == ""
    with pytest.raises(StorageError) as caught:
        save_or_check_settings(path, {"--seed": 2, "--new": "x"}, 3, "samples were drawn")
    assert str(caught.value).splitlines() == [
        f"{path}: its 3 samples were drawn with different settings:",
        "  --seed was 1, now 2",
        "  --new was not used, now x",
        "  --top-p was 0.5, now not used",
        "use the earlier values, name another file, or remove this one (to continue anyway, "
        "remove only out.jsonl.settings.json)",
    ]
    saved.write_text("[]")
    with pytest.raises(StorageError, match="does not contain the settings of samples: remove it"):
        save_or_check_settings(path, settings, 3, "samples were drawn")
    saved.unlink()
    save_or_check_settings(path, settings, 3, "samples were drawn")
    said = "cannot check whether the existing samples were drawn with the same settings\n"
    assert capsys.readouterr().out == f"WARNING: {saved} is missing: {said}"
    assert not saved.exists()


def test_nothing_is_saved_beside_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    for count in (0, 3):
        save_or_check_settings(Path(os.devnull), {"--seed": 1}, count, "samples were drawn")
    assert not Path(f"{os.devnull}.settings.json").exists()
    assert capsys.readouterr().out == ""
