#!/usr/bin/env python3
"""Pretrain a GPT model. This script defines what to train; `megatron/training` does the training.

python pretrain_gpt.py --help-all                            all flags
python pretrain_gpt.py --mock-data ...                       one process
torchrun --nproc-per-node 8 pretrain_gpt.py --data-path ...  eight processes
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping

if __name__ == "__main__":
    from megatron.command import guard_imports

    guard_imports()
    from megatron.config.parser import help_if_asked

    help_if_asked("pretrain_gpt.py")
    # Objects that imports create are never freed. Scanning them for garbage takes 0.3 s of the
    # 2.6 s that start-up takes.
    gc.disable()

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.ahead import batches_ahead
from megatron.data.chat import build_chat_datasets, rows_per_epoch
from megatron.data.datasets import DataRequest, Datasets
from megatron.data.gpt import build_gpt_datasets, longest_segment, make_batch, make_loss_mask
from megatron.data.logits import with_logits
from megatron.data.sample import SEGMENT_ENDS, TRAINED
from megatron.errors import ConfigError
from megatron.finetuning.distillation import (
    LOSS_NAMES,
    Distillation,
    GPTInputs,
    GPTTeacher,
    split_message,
    student_losses,
    top_log_probs_of,
)
from megatron.kernels.segments import Segments, number_segments
from megatron.models.gpt import GPTModel
from megatron.parallel.context.split import TokenBatch, context_part
from megatron.parallel.distillation import TopLogProbs, VocabularyPart
from megatron.parallel.layout import Layout
from megatron.tokenizer import Tokenizer
from megatron.training.pretrain import main
from megatron.training.recipe import Batch, Recipe, SampleCounts


class GPTRecipe(Recipe):
    """Next-token prediction on a stream of documents or, with --sft, on conversations."""

    program = "pretrain_gpt.py"
    architecture = "gpt"
    network = GPTModel
    teacher: GPTTeacher | None = None  # loaded before training, if --teacher-load names one

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the cross entropy and any distillation or multi-token losses."""
        names = LOSS_NAMES if config.distillation.is_on else LOSS_NAMES[:1]
        return (*names, *ahead_names(config.model.mtp_num_layers))

    def build_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        """Build datasets of documents or, with --sft, of conversations. Collective."""
        splits = self._open_datasets(config, tokenizer, samples, layout)
        if config.distillation.logits_load_dir is None or splits.train is None:
            return splits
        if not layout.pipeline.is_last:
            return splits  # only the last stage has a loss
        return splits._replace(train=with_logits(splits.train, config, tokenizer))

    def _open_datasets(
        self, config: RunConfig, tokenizer: Tokenizer, samples: SampleCounts, layout: Layout
    ) -> Datasets:
        request = DataRequest.of(config, samples, layout)
        length, pair = config.data.seq_length, (config.tokenizer, tokenizer)
        if config.preferences.preference_loss is not None:
            raise ConfigError(
                f"--preference-loss {config.preferences.preference_loss}: pretrain_gpt.py does not "
                "train on preferences: run finetune.py or megatron finetune"
            )
        if config.finetuning.sft:
            return build_chat_datasets(
                request, config.finetuning, seq_length=length, tokenizer=pair
            )
        return build_gpt_datasets(
            request, seq_length=length, vocab_size=tokenizer.vocab_size, tokenizer=pair
        )

    def epoch_samples(self, config: RunConfig, tokenizer: Tokenizer, layout: Layout) -> int:
        """Return the number of packed rows in an epoch of conversations. Collective."""
        return rows_per_epoch(self._open_datasets(config, tokenizer, (1, 0, 0), layout).train)

    def loss_mask(self, batch: Batch, config: RunConfig, tokenizer: Tokenizer) -> Tensor:
        """Return the loss mask of whole sequences [b, s]: 1 for labels that count, otherwise 0."""
        return make_loss_mask(batch, eod=tokenizer.eod, eod_mask_loss=config.data.eod_mask_loss)

    def inputs(
        self, batch: Batch, config: RunConfig, tokenizer: Tokenizer, layout: Layout
    ) -> GPTInputs:
        """Return the part of a micro-batch that the model reads on this context-parallel rank."""
        whole = make_batch(
            batch,
            eod=tokenizer.eod,
            reset_position_ids=config.data.reset_position_ids,
            eod_mask_loss=config.data.eod_mask_loss,
        )
        local = context_part(whole, layout.context)
        documents = None
        if SEGMENT_ENDS in batch:
            documents = Segments.of(batch[SEGMENT_ENDS], whole.tokens, longest_segment(batch))
        counted = _count(whole)
        depths = config.model.mtp_num_layers
        if not depths:
            return GPTInputs(local, documents, counted)
        # With --sft, the examples' masks decide which labels count.
        eod = None if TRAINED in batch else tokenizer.eod
        numbers = None if documents is None else number_segments(documents.ends, documents.shape)
        ahead = tuple(batches_ahead(whole, depths, numbers, eod=eod))
        return GPTInputs(
            local,
            documents,
            counted,
            tuple(context_part(shifted, layout.context) for shifted in ahead),
            tuple(map(_count, ahead)),
        )

    def forward(
        self,
        part: GPTModel,
        batch: Batch,
        hidden: Tensor | None,
        config: RunConfig,
        tokenizer: Tokenizer,
        layout: Layout,
    ) -> Tensor | Mapping[str, Tensor]:
        """Run one micro-batch through a part of the model. The last part returns the losses."""
        inputs = self.inputs(batch, config, tokenizer, layout)
        local = inputs.local
        hidden, teacher_output = self._run_teacher(part, inputs, hidden, config)
        knowledge: Tensor | TopLogProbs | None = teacher_output
        if config.distillation.logits_load_dir is not None and part.part.head:
            knowledge = top_log_probs_of(batch, layout.context)
        result = part(
            local.tokens,
            local.position_ids,
            local.labels if knowledge is None else None,  # without labels, the model returns logits
            inputs.documents,
            hidden,
            loss_mask=local.loss_mask,
            ahead=inputs.ahead,
        )
        if not part.part.head:
            return result if teacher_output is None else torch.cat((result, teacher_output), -1)
        if inputs.ahead:
            return losses_ahead(result, inputs, config, layout)
        losses = {"lm loss": result}
        if knowledge is not None:
            vocabulary = VocabularyPart(layout.tensor, tokenizer.vocab_size)
            losses = student_losses(result, local, knowledge, vocabulary, config.distillation)
        # The factor makes the mean over the context ranks equal to the mean over all tokens.
        return {
            name: layout.context.size * loss / inputs.num_labels for name, loss in losses.items()
        }

    def _run_teacher(
        self, part: GPTModel, inputs: GPTInputs, hidden: Tensor | None, config: RunConfig
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the teacher's part that is paired with a part of the model, if there is a teacher.

        Args:
            part: The part of the model.
            inputs: The micro-batch.
            hidden: The previous stage's message: the hidden states of the model, followed by those
                of the teacher if there is one; `None` for the first part.
            config: The run's configuration.

        Returns:
            The hidden states of the model, and the output of the teacher's part: hidden states, or
            logits from the last part. `None` if there is no teacher.
        """
        has_teacher = config.distillation.is_on and config.distillation.teacher_load is not None
        assert has_teacher == (self.teacher is not None), "Distillation.begin loads the teacher"
        if self.teacher is None:
            return hidden, None
        teacher_hidden: Tensor | None = None
        if hidden is not None:
            hidden, teacher_hidden = split_message(hidden, self.teacher.hidden)
        return hidden, self.teacher.run_paired(part, inputs, teacher_hidden)


def ahead_names(depths: int | None) -> tuple[str, ...]:
    """Return Megatron Core's names for the losses of multi-token prediction."""
    return tuple(f"mtp_{depth + 1} loss" for depth in range(depths or 0))


def losses_ahead(
    sums: Tensor, inputs: GPTInputs, config: RunConfig, layout: Layout
) -> dict[str, Tensor]:
    """Return the loss of the next token and of each depth of multi-token prediction.

    The value of each depth's loss is unweighted, for the log, but its gradient is multiplied by
    --mtp-loss-scaling-factor / --mtp-num-layers. With --calculate-per-token-loss, the weight of a
    micro-batch is its number of next-token labels, as in Megatron Core 0.17 and later.

    Args:
        sums: The sums of the losses over the labels that count, [1 + depths].
        inputs: The micro-batch, with the number of these labels at each depth.
        config: The run's configuration.
        layout: The grid of processes and this process's position in it.
    """
    main, *further = layout.context.size * sums
    losses = {LOSS_NAMES[0]: main / inputs.num_labels}
    names = ahead_names(config.model.mtp_num_layers)
    for name, total, counted in zip(names, further, inputs.num_labels_ahead, strict=True):
        mean = total / counted
        trained = config.model.mtp_loss_weight * mean
        losses[name] = mean.detach() + (trained - trained.detach())
    return losses


def _count(batch: TokenBatch) -> Tensor:
    """Return the number of labels that count, or 1 if none do, so that the loss is not nan."""
    return batch.loss_mask.sum().clamp(min=1)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    recipe = GPTRecipe()
    sys.exit(main(recipe, extras=Distillation(recipe)))
