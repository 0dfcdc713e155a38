"""A tokenizer like T5's in Hugging Face format, with few entries."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer as Pipeline
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from megatron.config.data import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer

WORDS, SENTINELS = 60, 8
SIZE = 3 + WORDS + SENTINELS


def write_t5_tokenizer(folder: Path) -> Path:
    """Write `<pad>`, `</s>`, `<unk>`, then w0, w1 ..., then the sentinels, last one first."""
    entries = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    vocab = {entry: index for index, entry in enumerate(entries)}
    pipeline = Pipeline(WordLevel(vocab, unk_token="<unk>"))
    pipeline.pre_tokenizer = WhitespaceSplit()
    pipeline.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    pipeline.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(SENTINELS))])
    folder.mkdir(exist_ok=True)
    pipeline.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def t5_tokenizer(folder: Path) -> Tokenizer:
    """Return that tokenizer, written to `folder`."""
    model = str(write_t5_tokenizer(folder))
    kind = "HuggingFaceTokenizer"
    return build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=model))
