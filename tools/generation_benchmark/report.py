"""The results of the benchmark, and their table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decoding:
    """The speed of decoding steps, each of which adds one token to every sequence of a batch.

    Attributes:
        batch: Number of sequences.
        length: Mean length of the sequences over the steps, in tokens.
        seconds: Seconds per step.
        floor: Seconds for reading the weights and the KV cache.
        theirs: Seconds per step of `transformers`, or `None` if not measured.
    """

    batch: int
    length: float
    seconds: float
    floor: float
    theirs: float | None = None


@dataclass(frozen=True)
class Result:
    """All measurements on one device.

    Attributes:
        device: Name of the device.
        torch: Version of PyTorch.
        model: Name of the model.
        precision: Name of the precision.
        parameters: Number of parameters.
        bandwidth: Bytes/s of a large copy.
        decoding: The speed of decoding for each batch size.
        prompt_tokens_per_second: The speed of prefill in tokens/s.
        prompt_length: Number of tokens in a prompt for prefill.
    """

    device: str
    torch: str
    model: str
    precision: str
    parameters: int
    bandwidth: float
    decoding: tuple[Decoding, ...]
    prompt_tokens_per_second: float
    prompt_length: int


def table(result: Result) -> str:
    """Return the results as a Markdown table."""
    lines = [
        f"{result.device}, torch {result.torch}; {result.model}, "
        f"{result.parameters / 1e9:.2f} billion parameters, {result.precision}; "
        f"copy {result.bandwidth / 1e12:.2f} TB/s",
        "",
        "| batch | mean length | tokens/s | ms per step | floor, ms | of floor | transformers, "
        "tokens/s | times |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(_row(decoding) for decoding in result.decoding),
        "",
        f"Prompts of {result.prompt_length} tokens: "
        f"{result.prompt_tokens_per_second:,.0f} tokens/s.",
    ]
    return "\n".join(lines)


def _row(row: Decoding) -> str:
    theirs, times = "-", "-"
    if row.theirs is not None:
        theirs, times = f"{row.batch / row.theirs:,.0f}", f"{row.theirs / row.seconds:.1f}"
    return (
        f"| {row.batch} | {row.length:.0f} | {row.batch / row.seconds:,.0f} | "
        f"{row.seconds * 1e3:.2f} | {row.floor * 1e3:.2f} | {row.floor / row.seconds:.0%} | "
        f"{theirs} | {times} |"
    )


def line(row: Decoding) -> str:
    """Describe one measurement in a line."""
    return f"batch {row.batch}: {row.seconds * 1e3:.2f} ms per step, floor {row.floor * 1e3:.2f} ms"
