"""Which tokenizer a folder of Hugging Face holds, by its files."""

from __future__ import annotations

from pathlib import Path

from megatron.checkpoint.hf import files
from megatron.checkpoint.hf.settings import read_json
from megatron.config.data import TokenizerConfig

_T5_SENTINELS = 100  # where the folder does not say


def tokenizer_in(folder: Path, architecture: str) -> TokenizerConfig:
    """The tokenizer of a folder; without a type where it has none.

    Args:
        architecture: kind of network, see `ModelConfig.architecture`.

    Raises:
        CheckpointError: its settings cannot be read.
    """
    paths = {name: str(folder / name) for name in files.COMPANIONS if (folder / name).is_file()}
    settings = paths.get(files.TOKENIZER_CONFIG)
    said = {} if settings is None else read_json(Path(settings))
    if architecture == "bert" and files.WORDPIECES in paths:
        lower = said.get("do_lower_case") is not False
        kind = "BertWordPieceLowerCase" if lower else "BertWordPieceCase"
        return TokenizerConfig(tokenizer_type=kind, vocab_file=paths[files.WORDPIECES])
    if files.TOKENIZER_JSON in paths:
        model = paths[files.TOKENIZER_JSON]
        return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model)
    if architecture == "t5" and files.SPIECE in paths:
        asked = said.get("extra_ids")
        return TokenizerConfig(
            tokenizer_type="GPTSentencePieceTokenizer",
            tokenizer_model=paths[files.SPIECE],
            vocab_extra_ids=asked if isinstance(asked, int) else _T5_SENTINELS,
        )
    if files.TOKENIZER_MODEL in paths:
        model = paths[files.TOKENIZER_MODEL]
        return TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=model)
    if files.VOCAB in paths and files.MERGES in paths:
        return TokenizerConfig(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=paths[files.VOCAB],
            merge_file=paths[files.MERGES],
        )
    return TokenizerConfig()
