"""The report on a corpus: what was dropped and why, samples, a chart, and the time of each step."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

from megatron.corpora.blocks import CorpusBlock, Document, output, shard
from megatron.corpora.plan import STEPS

_SAMPLES = 5  # samples per reason


def summarize(ledgers: list[Path], pieces: int) -> dict[str, Any]:
    """Add up the ledgers of all stages and pieces.

    Args:
        ledgers: The ledger folder of each stage that writes documents, in order.
        pieces: The number of pieces.

    Returns:
        The number of documents read ("read"), the number and bytes of documents kept ("kept"), the
        number that each step changed ("changed"), and for each reason in the order of the steps,
        counts and samples of the documents dropped ("dropped").
    """
    changed: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    read = 0
    dropped: dict[tuple[str, str], Counter[str]] = {}
    samples: dict[tuple[str, str], list[dict[str, str]]] = {}
    for stage, folder in enumerate(ledgers):
        kept = Counter()
        for piece in range(pieces):
            ledger = json.loads(shard(folder, piece, ".json").read_bytes())
            read += ledger["read"].get("documents", 0) if stage == 0 else 0
            kept.update(ledger["kept"])
            changed.update(ledger["changed"])
            for entry in ledger["dropped"]:
                key = (entry.pop("step"), entry.pop("reason"))
                dropped.setdefault(key, Counter()).update(entry)
            for sample in ledger["samples"]:
                samples.setdefault((sample["step"], sample["reason"]), []).append(sample)
    order = ["read", *STEPS]
    keys = sorted(dropped, key=lambda key: (order.index(key[0]), -dropped[key]["documents"], key))
    return {
        "read": read,
        "kept": {"documents": kept["documents"], "bytes": kept["bytes"]},
        "changed": {step: changed[step] for step in order if step in changed},
        "dropped": [
            {
                "step": step,
                "reason": reason,
                **dropped[step, reason],
                "samples": samples[step, reason][:_SAMPLES],
            }
            for step, reason in keys
        ],
    }


def draw(summary: dict[str, Any]) -> bytes:
    """Return a PNG chart of how many documents were dropped for each reason."""
    from matplotlib.figure import Figure

    rows = [
        (f"{entry['step']}: {entry['reason']}", entry["documents"]) for entry in summary["dropped"]
    ]
    rows = [*rows, ("kept", summary["kept"]["documents"])]
    total = max(summary["read"], 1)
    figure = Figure(figsize=(9, 1 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name, _ in rows]
    colors = ["tab:red"] * (len(rows) - 1) + ["tab:green"]
    bars = axes.barh(names, [100 * count / total for _, count in rows], color=colors)
    axes.bar_label(bars, [f" {count:,}" for _, count in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"% of {summary['read']:,} documents")
    axes.set_xlim(0, 115)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def as_text(summary: dict[str, Any]) -> str:
    """Format the counts of a summary as lines with aligned columns."""
    rows = [("read", summary["read"], "")]
    rows += [
        (
            f"  {entry['step']}: {entry['reason']}",
            -entry["documents"],
            f"{-entry['bytes'] / 1e6:.2f} MB",
        )
        for entry in summary["dropped"]
    ]
    kept = summary["kept"]
    rows += [("kept", kept["documents"], f"{kept['bytes'] / 1e6:.2f} MB")]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name.ljust(width)} {count:>12,} {size:>14}".rstrip() for name, count, size in rows]
    changed = [f"{step} changed {count:,}" for step, count in summary["changed"].items()]
    return "\n".join([*lines, *changed])


def measured_seconds(logs: Path) -> dict[str, float]:
    """Return the time spent in each block, in seconds, summed over all tasks, by block name.

    Args:
        logs: The folder of datatrove's logs, with a subfolder for each stage.
    """
    seconds: dict[str, float] = {}
    for file in sorted(logs.glob("*/stats/*.json")):
        for block in json.loads(file.read_bytes()):
            name = block["name"].partition(": ")[2]
            spent = block["time_stats"]  # a plain number if only one time was measured
            spent = spent["total"] if isinstance(spent, dict) else spent
            seconds[name] = seconds.get(name, 0.0) + float(spent)
    return seconds


class ReportWriter(CorpusBlock):
    """Writes report.json and report.png.

    Args:
        folder: The folder of the corpus.
        ledgers: The ledger folder of each stage that writes documents, in order.
        pieces: The number of pieces.
    """

    def __init__(self, folder: Path, ledgers: list[Path], pieces: int) -> None:
        """Store the settings."""
        super().__init__("report")
        self.folder, self.ledgers, self.pieces = folder, ledgers, pieces

    def run(self, data: Any, rank: int, world_size: int) -> list[Document]:
        """Write both files."""
        with self.track_time():
            summary = summarize(self.ledgers, self.pieces)
            with output(self.folder / "report.png") as file:
                file.write(draw(summary))
            with output(self.folder / "report.json") as file:
                file.write(json.dumps(summary, ensure_ascii=False, indent=1).encode())
        return []
