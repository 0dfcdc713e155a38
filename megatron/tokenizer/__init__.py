"""Text to ids and back, over well-kept libraries."""

from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.build import build_tokenizer, files_of, padded_vocabulary

__all__ = ["Tokenizer", "build_tokenizer", "files_of", "padded_vocabulary"]
