"""Packed documents against the same documents processed one at a time, in every layout.

The reference never sees two documents together: each passes through the model alone, at positions
from 0, without a mask. Only the sum of the losses is divided by the micro-batch's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.ahead import batches_ahead
from megatron.data.gpt import make_batch
from megatron.data.sample import SEGMENT_ENDS
from megatron.finetuning.distillation import GPTInputs
from megatron.models.gpt import GPTModel
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.passes import Passes
from megatron.training.recipe import Batch
from pretrain_gpt import GPTRecipe, losses_ahead
from tests.parity.layouts import Curves, train_curves
from tests.training.toy import RECIPES, build_toy

# Mock tokens count up modulo 7, and 6 ends a document: three or four share a sequence.
DOCUMENTS = "--reset-attention-mask --reset-position-ids --vocab-size 6"
ROPE = "--position-embedding-type rope"


class OneByOne(GPTRecipe):
    """Next-token prediction that processes the documents of a micro-batch one at a time."""

    def forward(
        self,
        part: GPTModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Return the mean loss of all tokens."""
        text, ends = batch["text"], batch[SEGMENT_ENDS].tolist()
        length, losses = text.shape[1] - 1, []
        depths = config.model.mtp_num_layers or 0
        counted = [torch.tensor(text.shape[0] * length)] + [torch.tensor(0)] * depths
        for start, end in pairwise(dict.fromkeys(ends)):  # skips empty documents
            row, first = divmod(start, length)
            alone = {"text": text[row : row + 1, first : first + end - start + 1]}
            one = make_batch(alone, eod=tokenizer.eod, eod_mask_loss=config.data.eod_mask_loss)
            # The token after an end belongs to the next document, so mask it out.
            inside = one._replace(loss_mask=one.loss_mask * (one.tokens != tokenizer.eod))
            ahead = list(batches_ahead(inside, depths))
            words = (one.tokens, one.position_ids, one.labels)
            losses.append(part(*words, loss_mask=one.loss_mask, ahead=ahead))
            for depth, b in enumerate(ahead, 1):
                counted[depth] = counted[depth] + b.loss_mask.sum()
        sums = torch.stack(losses).sum(0)
        if not depths:
            return {"lm loss": sums / counted[0]}
        inputs = GPTInputs(one, None, counted[0], num_labels_ahead=tuple(counted[1:]))
        return losses_ahead(sums, inputs, config, layout)


@cache
def one_by_one(words: tuple[str, ...]) -> Curves:
    """Return the single-process run that layouts must match: one document at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "gpt", OneByOne())
        return train_curves(Layout.single(), words)


def gradients(words: list[str], recipe: GPTRecipe) -> dict[str, Tensor]:
    """Return the gradients of two micro-batches on one process, by parameter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "gpt", recipe)
        run = build_toy(Layout.single(), words)
    Passes(run, run.train_batches, 2).forward_backward()
    run.gradients.reduce()
    return {name: run.gradients.gradient(p).clone() for name, p in run.named_parameters()}
