"""Shared by the tests of job files: files from flags, and words that no shell may interpret."""

from __future__ import annotations

from megatron.submit.command import build_parser, describe, render

COMMAND = ["--", "pretrain_gpt.py", "--config", "examples/gpt_tiny.yaml"]
# What a run needs so that it can be continued.
RESUME = ["--load", "x", "--save", "x", "--save-interval", "10"]
# Each has a meaning in some shell, in YAML, in Jinja2 or in Kubernetes.
HOSTILE = [
    "a b",
    "$(touch injected)",
    "`touch injected`",
    "'; touch injected; '",
    '"; touch injected; "',
    "$HOME",
    "$$HOME",
    "$$(HOME)",
    "$",
    "$$",
    "${IFS}",
    "a\nb",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "$(HOME)",
    "*",
    "~",
    "!x",
    "\\",
    "#",
    "&",
    ": - [",
    "é\u2028",
    "",
]


def job_file(target: str, *words: str) -> str:
    """Return the job file that `tools/submit.py --to target ...` prints."""
    options = build_parser().read(["--to", target, *words])
    return render(describe(options), target)
