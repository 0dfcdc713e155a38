"""How the samples of a file were drawn: kept beside it, for those that are to follow.

`FILE.settings.json` holds one JSON object, flag to value, with the model that `--load` named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron.config.samples import SamplesConfig
from megatron.durable import replace_file, storage_errors
from megatron.errors import StorageError
from megatron.inference.load import Loaded

Settings = Mapping[str, str | int | float]


def settings_of(samples: SamplesConfig, loaded: Loaded, seed: int) -> Settings:
    """What decides on the text behind a prompt; where nothing is drawn, the seed does not."""
    temperature = 0.0 if samples.greedy else samples.temperature
    found: dict[str, str | int | float] = {
        "--load": str(Path(loaded.config.checkpoint.load or "").resolve()),
        "iteration": loaded.iteration,
        "--out-seq-length": samples.out_seq_length,
        "--temperature": temperature,
    }
    if temperature:
        found |= {"--top_k": samples.top_k, "--top_p": samples.top_p, "--seed": seed}
    return found


def keep_settings(path: Path, done: int, settings: Settings) -> str:
    """Keep the settings of a new file of samples; compare with those of one that is gone on with.

    Args:
        path: of the samples.
        done: how many there are.

    Returns:
        A line for the log where it has samples and nothing says how they were drawn; else "".
        Beside what is no plain file nothing is kept.

    Raises:
        StorageError: its samples were drawn otherwise; lists flags and both values.
    """
    if not path.is_file():  # /dev/null has no place beside it
        return ""
    beside = path.with_name(f"{path.name}.settings.json")
    with storage_errors(beside):
        if not done:
            replace_file(beside, json.dumps(settings, indent=2).encode() + b"\n")
            return ""
        if not beside.exists():
            return f"WARNING: {beside} is missing: nothing says how these were drawn"
        before = _read(beside)
    differing = [
        f"{name} is {settings.get(name, 'not used')} here and {before.get(name, 'not used')} there"
        for name in (*settings, *(name for name in before if name not in settings))
        if settings.get(name) != before.get(name)
    ]
    if differing:
        raise StorageError(
            f"{path}: its {done} samples were drawn otherwise:\n  "
            + "\n  ".join(differing)
            + f"\ngive its values, name another file, or remove this one (or {beside.name} alone, "
            "to go on all the same)"
        )
    return ""


def _read(path: Path) -> Settings:
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise StorageError(f"{path}: holds no settings of samples: remove it, or name another file")
    return found
