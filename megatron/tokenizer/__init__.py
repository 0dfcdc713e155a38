"""Tokenizers: conversion of text to ids and back, based on well-maintained libraries.

    build, base                             construction from flags, and the common interface
    files                                   vocabulary files, and entries appended to them
    chat_template, turn_end                 conversations as the texts that chat models read
    library                                 calls to libraries, whose errors become DataError
    gpt2, fast_bpe                          GPT-2's BPE, and its fast encoders
    huggingface, sentencepiece, tiktoken    the other kinds
    wordpiece, yuan                         BERT's kind, and that of the Chinese Yuan models

Each kind imports its library only when it is built, so that no tool loads the other libraries.
"""

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import build_tokenizer, files_of, padded_vocabulary

__all__ = ["Tokenizer", "build_tokenizer", "files_of", "padded_vocabulary"]
