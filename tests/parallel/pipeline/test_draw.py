"""Drawings of a timeline: entries in a line of text, boxes in a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from megatron.parallel.pipeline.draw import as_text, draw
from megatron.parallel.pipeline.schedule import Operation
from megatron.parallel.pipeline.simulate import Interval, Timeline

_TIMELINE = Timeline(
    (
        (Interval(0, 1, Operation("forward", 0, 0)), Interval(1, 4, Operation("backward", 0, 0))),
        (
            Interval(1, 2, Operation("forward", 10, 1)),
            Interval(2, 2, Operation("backward_weight", 10, 1)),
        ),
    )
)


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (120, ["F0-B0-------", "...F10......"]),  # the shortest entry has 3 columns
        (8, ["F0B0----", "..F-...."]),
        (4, ["FB0-", ".F.."]),
    ],
)
def test_entries_are_as_long_as_the_line_allows(columns: int, lines: list[str]) -> None:
    expected = [f"stage {stage:2}  {line}" for stage, line in enumerate(lines)]
    assert as_text(_TIMELINE, columns).splitlines() == expected
    assert as_text(Timeline(((), ()))) == "stage  0  \nstage  1  "


def test_the_shortest_entry_sets_the_scale() -> None:
    spans = (0, 2, Operation("forward", 0, 0)), (2, 2.5, Operation("backward_weight", 0, 0))
    assert as_text(Timeline((tuple(Interval(*span) for span in spans),))) == "stage  0  F0------W0"


@pytest.mark.parametrize(("chunks", "suffixes"), [(2, [", chunk 0", ", chunk 1"]), (1, ["", ""])])
def test_a_picture_has_a_box_for_each_operation(
    chunks: int, suffixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, dpi: drawn.append(figure) if dpi == 120 else None
    )
    draw(_TIMELINE, "a title", chunks, tmp_path / "schedule.png")
    (figure,) = drawn
    (axes,) = figure.axes
    boxes = [(box.get_x(), box.get_width(), round(box.get_y(), 2)) for box in axes.patches]  # type: ignore[attr-defined]
    assert boxes == [(0, 1, -0.43), (1, 3, -0.43), (1, 1, 0.57), (2, 0, 0.57)]
    colors = [to_hex(box.get_facecolor()) for box in axes.patches]
    assert colors == ["#a6cee3", "#b2df8a", "#1f78b4", "#e6832a"]  # dark for the last chunk
    # A box without width has no room for its label, and a dark box has a white one.
    labels = [(text.get_text(), text.get_position(), text.get_color()) for text in axes.texts]
    assert labels[:2] == [("0", (0.5, 0), "black"), ("0", (2.5, 0), "black")]
    assert labels[2:] == [("10", (1.5, 1), "white")]
    assert {text.get_fontsize() for text in axes.texts} == {8}
    styles = {
        (round(box.get_height(), 2), box.get_linewidth(), to_hex(box.get_edgecolor()))  # type: ignore[attr-defined]
        for box in axes.patches
    }
    assert styles == {(0.86, 0.6, "#ffffff")}
    assert tuple(figure.get_size_inches()) == (16, 2.6)
    visible = [name for name, spine in axes.spines.items() if spine.get_visible()]
    assert visible == ["bottom"]
    assert {tick.tick1line.get_markersize() for tick in axes.yaxis.get_major_ticks()} == {0}
    assert axes.get_xlabel() == "time"
    assert axes.get_xlim() == (0, 4)
    assert axes.get_ylim() == (1.55, -0.55)  # the first stage is at the top
    assert axes.get_title() == "a title"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    (legend,) = figure.legends
    first, second = suffixes
    assert [text.get_text() for text in legend.get_texts()] == [
        *(f"forward{first}", f"forward{second}", f"backward{first}"),
        *(f"backward, weights{second}", "waiting"),
    ]
    assert legend._ncols == len(legend.legend_handles)  # type: ignore[attr-defined]
    keys = [to_hex(patch.get_facecolor()) for patch in legend.legend_handles]  # type: ignore[union-attr]
    assert keys == [colors[0], colors[2], colors[1], colors[3], "#eeeeee"]
    assert to_hex(axes.get_facecolor()) == "#eeeeee"


def test_only_boxes_with_room_for_their_label_have_one_and_no_screen_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    # A row is 15 inches wide, and a digit takes 0.09 inches.
    ends = (0, 0.89, 1.8, 3.59, 5.4, 150)
    spans = [
        Interval(start, end, Operation("forward", number, 0))
        for start, end, number in zip(ends, ends[1:], (1, 2, 33, 44, 5), strict=False)
    ]
    matplotlib.use("svg")
    draw(Timeline((tuple(spans),)), "", 1, tmp_path / "a" / "new" / "schedule.png")
    assert matplotlib.get_backend().lower() == "agg"
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == ["2", "44", "5"]
    assert (tmp_path / "a" / "new").is_dir()
    draw(Timeline(((), ())), "", 1, tmp_path / "schedule.png")
    (axes,) = drawn[1].axes
    assert (axes.get_xlim(), len(axes.texts)) == ((0, 1), 0)
