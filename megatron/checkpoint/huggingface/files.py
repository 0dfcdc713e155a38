"""Access to the files in an untrusted folder: which are read, and where links may point."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.huggingface.settings import read_json
from megatron.checkpoint.trust import open_trusted
from megatron.config.data import TokenizerConfig
from megatron.errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
COMPANION_FOLDER = "huggingface"  # the subfolder into which an import copies a model's small files
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER = "adapter_model.safetensors"  # written by LoRA and similar methods
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_MODEL = "tokenizer.model"
VOCAB, MERGES = "vocab.json", "merges.txt"
WORDPIECES = "vocab.txt"
SPIECE = "spiece.model"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files beside a tokenizer.json that name its special tokens and its chat template.
TOKENIZER_SETTINGS = (
    *(TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", CHAT_TEMPLATE),
)
# Files that are copied along with a model: data, never code.
COMPANIONS = (
    *(CONFIG, GENERATION_CONFIG, TOKENIZER_JSON, TOKENIZER_MODEL),
    *(*TOKENIZER_SETTINGS, VOCAB, MERGES, WORDPIECES, SPIECE),
)
MAX_COMPANION = 256 << 20  # bytes; the largest tokenizer files are about 10 MB
_MAX_INDEX = 32 << 20  # bytes; about 9 MB for the 91,991 tensors of DeepSeek-V3
_MAX_TOKENIZER_CONFIG = 32 << 20  # bytes; about 1.2 MB for Gemma 3, with its 6,242 added tokens

_SHARD = re.compile(r"[A-Za-z0-9][\w.-]{0,200}\.safetensors")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
_SENTINELS = 100  # number of T5's sentinel tokens if the folder does not specify it
# Tokenizer files that are used only for this kind of network (`ModelConfig.architecture`).
_SPECIAL = {"bert": WORDPIECES, "t5": SPIECE}


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, with all links resolved.

    Links may point from `snapshots/REVISION` to `blobs` of the same model, as in the Hub's cache.

    Raises:
        CheckpointError: The file is missing, or is a link to a path outside the folder.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file")
    homes = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        homes.append(folder.absolute().parents[1].resolve() / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(home) for home in homes):
        raise CheckpointError(f"{path}: a link out of the folder, which is not followed")
    return target


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder looks like a Hugging Face model, even if its tensors are pickled."""
    names = (SINGLE, INDEX, *_PICKLED)
    # Unlike Path's methods, these return False if there is no permission to look.
    is_file, exists = os.path.isfile, os.path.exists
    return is_file(folder / CONFIG) and any(exists(folder / name) for name in names)


def find_shards(folder: Path, *, allow_foreign: bool = False) -> dict[str, Path]:
    """Return the file of each tensor by tensor name, or {"": file} if there is no index.

    Args:
        folder: The folder.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: There are no readable files, the index is damaged or refused, or it names
            anything but plain files in this folder.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: not a folder: give a local folder (nothing is downloaded)"
        )
    if (folder / INDEX).exists():
        index = read_json(inside(folder, INDEX), max_bytes=_MAX_INDEX, allow_foreign=allow_foreign)
        listed = index.get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{folder / INDEX}: no weight_map")
        for name in listed.values():
            if not isinstance(name, str) or not _SHARD.fullmatch(name):
                raise CheckpointError(f"{folder / INDEX}: {name!r} is not a valid shard name")
        return {tensor: inside(folder, name) for tensor, name in listed.items()}
    if (folder / SINGLE).exists():
        return {"": inside(folder, SINGLE)}
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if pickled:
        reason = "is a pickle, which can run code when it is read; only safetensors is read"
        remedy = "save the model again with save_pretrained"
        raise CheckpointError(f"{folder}: {pickled[0]} {reason}: {remedy}")
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder}: {ADAPTER} changes another model's weights: merge both first "
            "(merge_and_unload of peft), and save the result with save_pretrained"
        )
    raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}")


def companions(folder: Path, *, allow_foreign: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of each small file (`COMPANIONS`) that belongs to the model.

    Args:
        folder: The model's folder.
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: A file is too large, is a link to a path outside the folder, or cannot be
            trusted.
        OSError: A file cannot be opened.
    """
    for name in COMPANIONS:
        if not (folder / name).exists():
            continue
        path = inside(folder, name)
        with open_trusted(path, allow_foreign=allow_foreign) as file:
            data = file.read(MAX_COMPANION + 1)
        if len(data) > MAX_COMPANION:
            raise CheckpointError(f"{path}: larger than {MAX_COMPANION:,} bytes")
        yield name, data


def json_bytes(value: object) -> bytes:
    """Return JSON text as `transformers` writes it: indented, sorted, with a final newline."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def tokenizer_in(
    folder: Path, architecture: str, *, allow_foreign: bool = False
) -> TokenizerConfig:
    """Return the settings of a folder's tokenizer, without a type if there is no tokenizer.

    Args:
        folder: The folder.
        architecture: The kind of network (`ModelConfig.architecture`).
        allow_foreign: Accept files owned by other users.

    Raises:
        CheckpointError: tokenizer_config.json cannot be read, or is refused.
    """
    paths = {name: str(folder / name) for name in COMPANIONS if (folder / name).is_file()}
    settings, special = paths.get(TOKENIZER_CONFIG), _SPECIAL.get(architecture)
    tokenizer_config: dict[str, Any] = {}
    if settings is not None:
        tokenizer_config = read_json(
            Path(settings), max_bytes=_MAX_TOKENIZER_CONFIG, allow_foreign=allow_foreign
        )
    extra, used = 0, dict[str, Any]()
    if special == WORDPIECES and WORDPIECES in paths:
        lower = tokenizer_config.get("do_lower_case") is not False
        kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
        used["vocab_file"] = paths[WORDPIECES]
    elif TOKENIZER_JSON in paths:
        kind, used["tokenizer_model"] = "HuggingFaceTokenizer", paths[TOKENIZER_JSON]
    elif special == SPIECE and SPIECE in paths:
        kind, used["tokenizer_model"] = "GPTSentencePieceTokenizer", paths[SPIECE]
        requested = tokenizer_config.get("extra_ids")
        extra = requested if isinstance(requested, int) else _SENTINELS
    elif TOKENIZER_MODEL in paths:
        kind, used["tokenizer_model"] = "Llama2Tokenizer", paths[TOKENIZER_MODEL]
    elif VOCAB in paths and MERGES in paths:
        kind, used = "GPT2BPETokenizer", {"vocab_file": paths[VOCAB], "merge_file": paths[MERGES]}
    else:
        return TokenizerConfig()
    return TokenizerConfig(tokenizer_type=kind, vocab_extra_ids=extra, **used)
