"""Training on preferences: pairs of a chosen and a rejected answer to the same prompt.

The two documents of a pair lie next to each other in one row. The loss is the mean over the pairs
of the global batch, because rows hold different numbers of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.config.stages import ModelPart
from megatron.data.datasets import DataRequest
from megatron.data.gpt import context_part, make_batch
from megatron.data.preferences import (
    PAIRS,
    REFERENCE,
    build_preference_datasets,
    preference_members,
)
from megatron.data.sample import LONGEST_SEGMENT, SEGMENT_ENDS, TRAINED
from megatron.finetuning.documents import DocumentSums, document_sums
from megatron.finetuning.preference_losses import Pairs, pair_losses
from megatron.kernels.attention import Segments
from megatron.models.build import build_model
from megatron.models.gpt import GPTModel
from megatron.models.plan import HeadSpec
from megatron.parallel.build import BuildContext
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.recipe import Batch, SampleCounts, Splits

# TRL's names of what is logged.
METRICS = (
    "loss",
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


class PreferenceRecipe:
    """The losses of `preference_losses` on packed pairs."""

    program = "finetune.py"
    architecture = "gpt"
    head = HeadSpec(compares=True)

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the log names of the loss and of what TRL reports beside it."""
        return METRICS

    def build_part(
        self,
        config: RunConfig,
        context: BuildContext,
        padded_vocab_size: int,
        part: ModelPart,
    ) -> GPTModel:
        """Build one pipeline stage's part of the model."""
        return build_model(GPTModel, config, context, padded_vocab_size, part)

    def describe_kernels(self, part: GPTModel) -> str:
        """Name the form of attention and say why it was chosen."""
        return f"{part.attention_choice.name} attention ({part.attention_choice.reason})"

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Splits:
        """Build rows of packed pairs. Collective."""
        return build_preference_datasets(
            DataRequest(
                config.data,
                config.training.seed,
                samples,
                is_builder=layout.world.rank == 0,
                barrier=layout.wait_for_all,
                unit=config.training.samples_per_unit,
            ),
            config.finetuning,
            seq_length=config.data.seq_length,
            tokenizer=(config.tokenizer, tokenizer),
        )

    def epoch_samples(self, config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> int:
        """Return the number of rows in an epoch of pairs. Collective."""
        train = self.build_datasets(config, tokenizer, (1, 0, 0), layout)[0]
        return sum(member.packing.rows for member in preference_members(train))

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return 1 for each pair, at its first token: the loss is a mean over pairs."""
        return batch[PAIRS].float()

    def forward(
        self,
        part: GPTModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model; at its end return loss and metrics."""
        found = run_documents(part, batch, hidden, tokenizer, layout)
        if isinstance(found, Tensor):
            return found
        is_pair = at_segments(batch, PAIRS)[:-1] > 0
        policy, tokens = (pairs_of(sums, is_pair) for sums in found)
        reference = None
        if config.preferences.needs_reference:
            reference = pairs_of(at_segments(batch, REFERENCE), is_pair)
        result = pair_losses(config.preferences, policy, tokens, reference)
        values = {
            "loss": result.losses,
            "rewards/chosen": result.rewards.chosen,
            "rewards/rejected": result.rewards.rejected,
            "rewards/accuracies": (result.rewards.difference > 0).double(),
            "rewards/margins": result.rewards.difference,
            "logps/chosen": policy.chosen.detach(),
            "logps/rejected": policy.rejected.detach(),
        }
        count = is_pair.sum().clamp(min=1)
        return {
            name: (torch.where(is_pair, values[name], 0).sum() / count).float() for name in METRICS
        }


def run_documents(
    part: GPTModel, batch: Batch, hidden: Tensor | None, tokenizer: Tokenizer, layout: Layout
) -> Tensor | DocumentSums:
    """Run one micro-batch through a part of the model.

    Args:
        part: The part.
        batch: Rows of packed documents.
        hidden: The previous part's output; `None` for the first part.
        tokenizer: The run's tokenizer.
        layout: The ranks of this process.

    Returns:
        Hidden states, or at the end of the model the log-probability of each segment.
    """
    result = run_part(part, batch, hidden, tokenizer, layout)
    if not part.part.head:
        return result
    return document_sums(result, batch[TRAINED], batch[SEGMENT_ENDS], layout.context)


def run_part(
    part: GPTModel, batch: Batch, hidden: Tensor | None, tokenizer: Tokenizer, layout: Layout
) -> Tensor:
    """Run one micro-batch through a part of the model and return what the part returns.

    Args:
        part: The part.
        batch: Rows of packed documents.
        hidden: The previous part's output; `None` for the first part.
        tokenizer: The run's tokenizer.
        layout: The ranks of this process.
    """
    whole = make_batch(batch, eod=tokenizer.eod)
    mine = context_part(whole, layout.context)
    longest = len(batch[LONGEST_SEGMENT]) if LONGEST_SEGMENT in batch else None
    documents = Segments.of(batch[SEGMENT_ENDS], whole.tokens, longest)
    result: Tensor = part(mine.tokens, mine.position_ids, mine.labels, documents, hidden)
    return result


def at_segments(batch: Batch, name: str) -> Tensor:
    """Return the values of one of the batch's arrays [b, s] at the first token of each segment.

    Empty segments behind the last token have the values of that token, at which no pair begins.
    """
    values = batch[name].flatten()
    return values[batch[SEGMENT_ENDS][:-1].clamp(max=len(values) - 1)]


def pairs_of(values: Tensor, is_pair: Tensor) -> Pairs:
    """Return the numbers of pairs from those of k segments, in tensors of constant shape [k - 1].

    Counting pairs first would make the host wait for the device.

    Args:
        values: The number of each segment, [k].
        is_pair: Whether each segment but the last is a chosen answer, which the rejected one
            follows, [k - 1]. The others get -1, for which every loss has a finite gradient.
    """
    return Pairs(torch.where(is_pair, values[:-1], -1.0), torch.where(is_pair, values[1:], -1.0))
