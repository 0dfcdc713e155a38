"""Drawings of a timeline, as text and as an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.durable import writing_to
from megatron.parallel.pipeline.schedule import OperationKind
from megatron.parallel.pipeline.simulate import Interval, Timeline

# Light for the first chunk, darker for each later chunk.
_COLORS: dict[OperationKind, tuple[str, str]] = {
    "forward": ("#a6cee3", "#1f78b4"),
    "backward": ("#b2df8a", "#33a02c"),
    "backward_input": ("#b2df8a", "#33a02c"),
    "backward_weight": ("#fdd49e", "#e6832a"),
}
_LABELS: dict[OperationKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, inputs",
    "backward_weight": "backward, weights",
}
_LETTERS = {"forward": "F", "backward": "B", "backward_input": "B", "backward_weight": "W"}


def as_text(timeline: Timeline, columns: int = 120) -> str:
    """Return one line of text per stage, with an entry per operation and dots for idle time.

    An entry consists of F, B or W, the index of the micro-batch, and dashes for longer operations.
    The shortest operation gets just enough columns for its entry, or fewer if a line would
    otherwise exceed `columns` after its stage number. An entry that is too narrow has no index.
    """
    spans = [span for line in timeline.spans for span in line if span.end > span.start]
    shortest = min((span.end - span.start for span in spans), default=1.0)
    width = 1 + len(str(max((span.operation.micro_batch for span in spans), default=0)))
    scale = min(width / shortest, columns / timeline.total) if spans else 1.0
    lines = []
    for stage, line in enumerate(timeline.spans):
        text = ["."] * round(timeline.total * scale)
        for span in line:
            start, end = round(span.start * scale), round(span.end * scale)
            letter = _LETTERS[span.operation.kind]
            label = f"{letter}{span.operation.micro_batch}"
            length = end - start
            text[start:end] = (label if length >= len(label) else letter).ljust(length, "-")[
                :length
            ]
        lines.append(f"stage {stage:2}  {''.join(text)}")
    return "\n".join(lines)


def draw(timeline: Timeline, title: str, chunks: int, output: Path) -> None:
    """Draw one row per stage and one box per operation, labeled with its micro-batch.

    Args:
        timeline: The timing of every computation.
        title: The line above the drawing.
        chunks: The number of chunks per stage.
        output: The file to write (--output). Missing folders are created.

    Raises:
        StorageError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    stages = len(timeline.spans)
    figure, axes = pyplot.subplots(figsize=(16, 1.6 + 0.5 * stages), layout="constrained")
    per_inch = 15 / timeline.total if timeline.total else 1.0
    used: dict[tuple[OperationKind, int], None] = {}
    for stage, line in enumerate(timeline.spans):
        for span in line:
            kind, chunk = span.operation.kind, span.operation.chunk
            used[kind, chunk] = None
            _box(axes, stage, span, _shade(kind, chunk, chunks), per_inch)
    axes.set(xlim=(0, timeline.total or 1), ylim=(stages - 0.45, -0.55), xlabel="time", title=title)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(axis="y", length=0)
    axes.set_facecolor("#eeeeee")  # the bubble is the visible background
    axes.spines[["top", "right", "left"]].set_visible(False)
    order = sorted(used, key=lambda pair: (list(_LABELS).index(pair[0]), pair[1]))
    handles = [
        Patch(
            facecolor=_shade(kind, chunk, chunks),
            label=_LABELS[kind] + (f", chunk {chunk}" if chunks > 1 else ""),
        )
        for kind, chunk in order
    ]
    handles.append(Patch(facecolor="#eeeeee", label="waiting"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 9))
    with writing_to("--output", output):
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=120)
    pyplot.close(figure)


def _shade(kind: OperationKind, chunk: int, chunks: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    light, dark = (to_rgb(color) for color in _COLORS[kind])
    share = chunk / max(chunks - 1, 1)
    red, green, blue = (a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _box(
    axes: Any, stage: int, span: Interval, color: tuple[float, float, float], per_inch: float
) -> None:
    width = span.end - span.start
    axes.barh(
        stage, width, left=span.start, height=0.86, color=color, edgecolor="white", linewidth=0.6
    )
    label = str(span.operation.micro_batch)
    if width * per_inch > 0.09 * len(label):
        is_dark = sum(color) < 1.5
        axes.text(
            span.start + width / 2,
            stage,
            label,
            ha="center",
            va="center",
            fontsize=8,
            color="white" if is_dark else "black",
        )
