"""The preprocessing benchmark: its error for missing text."""

import pytest

from tools import benchmark_preprocess


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.tar", "no such file or folder"),
        (".", "contains no text"),
        ("torn.tar", "not a folder and not a tar file"),
    ],
)
def test_text_that_is_missing_is_named(tmp_path, capsys, name, message) -> None:
    (tmp_path / "torn.tar").write_text("x")
    words = ["--vocab-file", "a", "--merge-file", "b", "--text", str(tmp_path / name)]
    assert benchmark_preprocess.main(words) == 6
    assert message in capsys.readouterr().err
