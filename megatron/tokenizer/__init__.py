"""Tokenizers, which convert text to token ids and back.

    build, base                             construction from flags, and the common interface
    files                                   vocabulary files and the entries appended to them
    chat_template, turn_end                 chat templates, and the token that ends an answer
    library                                 library calls, with every error turned into a DataError
    gpt2, fast_bpe                          GPT-2's BPE and its fast encoders
    huggingface, sentencepiece, tiktoken    tokenizers that use the libraries of these names
    wordpiece                               BERT's WordPiece, and the Chinese Yuan models' tokenizer

A library is imported only when a tokenizer that needs it is built.
"""

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import build_tokenizer, files_of, padded_vocabulary

__all__ = ["Tokenizer", "build_tokenizer", "files_of", "padded_vocabulary"]
