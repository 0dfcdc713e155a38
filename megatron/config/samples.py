"""What `tools/generate_samples_gpt.py` is to write."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import flag
from megatron.config.server import MOST_SEQUENCES

_MOST_SAMPLES = 10_000_000  # of a file, which is read whole where it is gone on with


@dataclass(frozen=True, kw_only=True)
class SamplesConfig:
    """Samples."""

    prompt: str | None = flag(None, "Prompt to continue; the result is printed.")
    sample_input_file: str | None = flag(
        None,
        'File of prompts, one a line; of *.jsonl the "prompt" or else the "text" of each object.',
    )
    sample_output_file: str | None = flag(
        None,
        "JSON lines for what follows them. An existing file is continued. Default: the input "
        "file with .out behind its name.",
    )
    num_samples: int = flag(
        0, "Texts without a prompt, or with --prompt texts for it (then 0 is 1).", unit="texts"
    )
    genfile: str | None = flag(
        None, "JSON lines for texts without a prompt, as --sample-output-file. Default: printed."
    )
    out_seq_length: int = flag(
        1024,
        "Tokens of an answer, at most; prompt and answer together also end at the model's window.",
        unit="tokens",
    )
    greedy: bool = flag(False, "Always choose the most likely token.")
    temperature: float = flag(1.0, "Divides scores before a token is drawn; 0: greedy.")
    top_k: int = flag(
        0,
        "Sample from the k most likely tokens. 0 disables the limit.",
        names=("--top_k", "--top-k"),
    )
    top_p: float = flag(
        0.0,
        "Only the most likely tokens that together have this probability. 0: all.",
        names=("--top_p", "--top-p"),
    )
    recompute: bool = flag(
        False, "Not needed: keys and values are always kept, which changes no result."
    )
    max_batch_size: int = flag(64, "Texts that are computed at a time.", unit="texts")


def problems_of(samples: SamplesConfig) -> list[str]:
    """One line for each mistake."""
    checks = (
        (
            samples.prompt is None
            and samples.sample_input_file is None
            and samples.num_samples < 1,
            "nothing to write: give --prompt TEXT, --sample-input-file FILE, or --num-samples N "
            "for texts without a prompt",
        ),
        (
            samples.prompt is not None and samples.sample_input_file is not None,
            "--prompt and --sample-input-file exclude each other: keep one",
        ),
        (
            samples.sample_input_file is not None and samples.num_samples > 0,
            f"--num-samples {samples.num_samples} is of texts without a prompt: drop it, or "
            "--sample-input-file",
        ),
        (
            samples.sample_input_file is None and samples.sample_output_file is not None,
            "--sample-output-file belongs to --sample-input-file: give that, or --genfile",
        ),
        (
            samples.genfile is not None
            and (samples.prompt is not None or samples.sample_input_file is not None),
            "--genfile is of texts without a prompt: drop it, or --prompt or --sample-input-file",
        ),
        (
            any("\ud800" <= letter <= "\udfff" for letter in samples.prompt or ""),
            "--prompt: not UTF-8: convert the text, for example with iconv",
        ),
        (samples.prompt == "", "--prompt is empty: give some text, or --num-samples alone"),
        (samples.num_samples < 0, f"--num-samples {samples.num_samples}: give 0 or more"),
        (samples.out_seq_length < 1, f"--out-seq-length {samples.out_seq_length}: give 1 or more"),
        (
            not 0 <= samples.temperature <= 100,
            f"--temperature {samples.temperature:g}: give 0 (greedy) to 100",
        ),
        (samples.top_k < 0, f"--top_k {samples.top_k}: give 0 (all) or more"),
        (not 0 <= samples.top_p <= 1, f"--top_p {samples.top_p:g}: give 0 (all) to 1"),
        (
            not 1 <= samples.max_batch_size <= MOST_SEQUENCES,
            f"--max-batch-size {samples.max_batch_size}: give 1 to {MOST_SEQUENCES}",
        ),
        (
            samples.num_samples > _MOST_SAMPLES,
            f"--num-samples {samples.num_samples}: give at most {_MOST_SAMPLES} for a file",
        ),
    )
    return [message for wrong, message in checks if wrong]


def find_sample_notices(samples: SamplesConfig) -> list[str]:
    """One line for each flag that is taken but changes nothing, with the reason."""
    if not samples.recompute:
        return []
    return ["--recompute changes nothing: keys and values are always kept, with the same results"]
