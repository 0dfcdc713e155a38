"""Text from a trained model: the plain form, which runs the whole window for every token."""

from __future__ import annotations

import torch

from megatron.errors import UserError
from megatron.inference.sampling import sample
from megatron.models.gpt import GPTModel
from megatron.tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model: GPTModel,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    window: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """`prompt` and what the model says next, until end of document or `max_new_tokens`.

    Args:
        window: tokens the model sees at once: its sequence length. Earlier ones are dropped.
        temperature, top_k: see `sampling.sample`.
        seed: the same seed gives the same text.

    Raises:
        UserError: the prompt is empty.
    """
    ids = list(tokenizer.tokenize(prompt))
    if not ids:
        raise UserError("--prompt is empty: give some text to go on from")
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    model.eval()
    for _ in range(max_new_tokens):
        tokens = torch.tensor([ids[-window:]], device=device)  # [1, s]
        logits = model(tokens)[:, -1, : tokenizer.vocab_size]  # [1, v]; padding has no text
        token = int(sample(logits, temperature=temperature, top_k=top_k, generator=generator))
        if token == tokenizer.eod:
            break
        ids.append(token)
    return tokenizer.detokenize(ids)
