"""Which training configurations of Megatron-LM's own functional tests our parser accepts.

    python -m tests.config.functional_tests PATH_OF_A_CHECKOUT

Data, tokenizers and folders are replaced by ones that need no files; all other flags stay as they
are. Configurations for text generation and reinforcement learning are left out.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.config.parser import Program, parse_config
from megatron.errors import ConfigError

_CONFIGURATION = "tests/functional_tests/test_cases/*/*/model_config.yaml"
_KINDS = {"bert": "bert", "t5": "t5"} | dict.fromkeys(
    ("gpt", "moe", "hybrid", "mixtral", "nemotron"), "gpt"
)
_REPLACED = frozenset(
    "--data-path --data-args-path --per-split-data-args-path --data-cache-path --mock-data "
    "--vocab-file --merge-file --vocab-size --vocab-extra-ids --tokenizer-type --tokenizer-model "
    "--load --save --use-checkpoint-args --tensorboard-dir".split()
)
_BY = "--mock-data --tokenizer-type NullTokenizer --vocab-size 30000".split()
_SIZES = (
    "tensor-model-parallel",
    "pipeline-model-parallel",
    "context-parallel",
    "expert-model-parallel",
)


def configurations(checkout: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the name, the architecture and the flags of each training configuration."""
    for file in sorted(checkout.glob(_CONFIGURATION)):
        kind = _KINDS.get(file.parent.parent.name)
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        flags = content.get("MODEL_ARGS")
        mode = content.get("MODE", "pretraining")
        trains = isinstance(flags, dict) and "--micro-batch-size" in flags
        if kind and trains and mode == "pretraining":
            yield "/".join(file.parts[-3:-1]), kind, flags


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Return the words of a configuration's command line, as Megatron's test runner writes them."""
    words = [*_BY]
    for name, value in flags.items():
        if name in _REPLACED or value is False or "${" in str(value):
            continue
        words.append(name)
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True and value is not None:
            text = str(value)
            is_list = re.fullmatch(r"\[[^]]+\]", text)  # and not a pattern of layers
            words += text[1:-1].split() if is_list else [text]
    return words


def problems_of(kind: str, flags: Mapping[str, Any]) -> list[str]:
    """Return the mistakes that our parser finds in a configuration."""
    processes = 1
    for size in _SIZES:
        processes *= int(flags.get(f"--{size}-size", 1))
    try:
        parse_config(
            command_line(flags),
            world_size=max(8, processes),
            architecture=kind,
            program=Program(name=f"pretrain_{kind}.py"),
        )
    except ConfigError as error:
        return error.problems
    return []


def main(argv: Sequence[str] | None = None) -> None:
    """Print each refused configuration, how often each flag is refused, and the total."""
    parser = argparse.ArgumentParser(prog="python -m tests.config.functional_tests")
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM")
    found = {
        name: problems_of(kind, flags)
        for name, kind, flags in configurations(parser.parse_args(argv).checkout)
    }
    counts = Counter(
        re.split(r"[ :]", line, maxsplit=1)[0] for lines in found.values() for line in {*lines}
    )
    for name, lines in found.items():
        if lines:
            print("\n    ".join([name, *lines]))
    print(", ".join(f"{flag} {count}" for flag, count in counts.most_common()))
    print(
        f"{sum(not lines for lines in found.values())} of {len(found)} configurations are accepted"
    )


if __name__ == "__main__":
    main()
