"""Text to ids and back, over well-kept libraries.

    build, base                             from flags to a tokenizer, and the interface of each
    files                                   vocabulary files, and entries appended to them
    gpt2, fast_bpe                          GPT-2's BPE, and its fast encoders
    huggingface, sentencepiece, tiktoken    the other kinds
    wordpiece                               BERT's kind

A kind imports its library only when it is built, so that no tool pays for the others.
"""

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import build_tokenizer, files_of, padded_vocabulary

__all__ = ["Tokenizer", "build_tokenizer", "files_of", "padded_vocabulary"]
