"""Distillation: a GPT model learns from a teacher's distribution for every token.

The teacher is a second model on the same processes. Alternatively, its top log-probabilities are
read together with each sample (`megatron.data.logits`). The loss is (1 - A) * cross entropy + A *
divergence, with A given by --kd-loss-alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megatron.command import print_line
from megatron.config import RunConfig
from megatron.config.distillation import DistillationConfig
from megatron.data.logits import TOP_IDS, TOP_REST, TOP_VALUES
from megatron.device import Device
from megatron.kernels.segments import Segments
from megatron.models.gpt import GPTModel
from megatron.models.plan import ModelPlan
from megatron.models.plans import model_plan
from megatron.parallel.context.split import TokenBatch, split_sequence
from megatron.parallel.distillation import TopLogProbs, VocabularyPart, distillation_losses
from megatron.parallel.layout import Axis, Layout
from megatron.tokenizer import Tokenizer
from megatron.training.log_line import DIVERGENCE
from megatron.training.passes import message_shape
from megatron.training.pretrain import Extras
from megatron.training.recipe import Batch, Recipe
from megatron.training.run import Run

# The names in the log: the cross entropy of the data, and the divergence from the teacher.
LOSS_NAMES = ("lm loss", DIVERGENCE)


class GPTInputs(NamedTuple):
    """The part of a micro-batch that a GPT model reads on this context rank.

    Attributes:
        local: This rank's tokens, labels, loss mask and positions.
        documents: The documents of the batch, if attention does not cross their boundaries.
        num_labels: The number of labels that count toward the loss in the whole micro-batch, at
            least 1.
        ahead: The same as `local`, for each depth of multi-token prediction.
        num_labels_ahead: The same as `num_labels`, for each depth.
    """

    local: TokenBatch
    documents: Segments | None
    num_labels: Tensor
    ahead: tuple[TokenBatch, ...] = ()
    num_labels_ahead: tuple[Tensor, ...] = ()


class GPTTeacher(NamedTuple):
    """A trained model in evaluation mode, split over the same processes as its student.

    In a pipeline, each part of the teacher computes in the same forward pass as a part of the
    student, and their hidden states are sent side by side in one message. The schedule is therefore
    the same as without a teacher, and at most one micro-batch's logits exist at a time.

    Attributes:
        parts: This process's parts of the model, without gradients.
        name: The name of the checkpoint, for messages.
        description: A description of the model's size, for messages.
        students: The part of the student that runs together with each part; empty if there is no
            student.
    """

    parts: list[GPTModel]
    name: str
    description: str
    students: Sequence[nn.Module] = ()

    @property
    def hidden(self) -> int:
        """The width of the teacher's hidden states."""
        return self.parts[0].plan.hidden

    @torch.no_grad()
    def run(self, part: GPTModel, inputs: GPTInputs, hidden: Tensor | None = None) -> Tensor:
        """Run a part on this context rank's tokens.

        Args:
            part: One of the parts.
            inputs: This context rank's tokens.
            hidden: The previous part's output [s, b, h]; `None` for the first part.

        Returns:
            Hidden states [s, b, h]; from the last part, logits [b, s, v/t].
        """
        local = inputs.local
        result: Tensor = part(local.tokens, local.position_ids, None, inputs.documents, hidden)
        return result

    def run_paired(
        self, student: nn.Module, inputs: GPTInputs, hidden: Tensor | None = None
    ) -> Tensor:
        """Run the part of the teacher that is paired with a part of the student, as `run` does.

        Args:
            student: The part of the student.
            inputs: This context rank's tokens.
            hidden: The previous part's output [s, b, h]; `None` for the first part.
        """
        return self.run(self.parts[list(self.students).index(student)], inputs, hidden)


class LearningRecipe(Recipe, Protocol):
    """A recipe for a GPT model that can learn from a teacher."""

    teacher: GPTTeacher | None
    """The teacher on the same processes, or `None`."""

    def inputs(
        self, batch: Batch, config: RunConfig, tokenizer: Tokenizer, layout: Layout
    ) -> GPTInputs:
        """Return the part of a micro-batch that a GPT model reads on this context rank.

        Args:
            batch: The micro-batch, with whole sequences.
            config: The run's configuration.
            tokenizer: The run's tokenizer.
            layout: The ranks of this process.
        """


class Distillation(Extras):
    """The steps that distillation adds to training.

    Args:
        recipe: The recipe to which the teacher is attached.
    """

    def __init__(self, recipe: LearningRecipe) -> None:
        """Store the recipe."""
        self._recipe = recipe

    def replace_training(self, config: RunConfig, device: Device, layout: Layout) -> bool:
        """Write a teacher's logits instead of training if --logits-save-dir is set.

        Returns:
            Whether training is replaced.
        """
        if config.distillation.logits_save_dir is None:
            return False
        from megatron.finetuning.teacher import save_logits  # few runs load a second model

        save_logits(config, self._recipe, device, layout)
        return True

    def teacher_plan(self, config: RunConfig, vocabulary: int) -> ModelPlan | None:
        """Return the plan of the --teacher-load network, or `None` if the flag is not given."""
        if config.distillation.teacher_load is None:
            return None
        from megatron.finetuning.teacher import open_teacher  # few runs load a second model

        _, saved = open_teacher(config.distillation.teacher_load, config, verify=False)
        return model_plan(saved.model, vocabulary)

    def begin(self, run: Run) -> None:
        """Load the teacher that --teacher-load names, if any. Collective.

        The run's plan and the shape of its pipeline messages then include the teacher.
        """
        folder = run.config.distillation.teacher_load
        if folder is None:
            return
        from megatron.finetuning.teacher import load_teacher  # few runs load a second model

        teacher = load_teacher(folder, run.config, run.tokenizer, run.device, run.layout)
        self._recipe.teacher = teacher._replace(students=run.parts)
        run.plan = replace(run.plan, teacher=teacher.parts[0].plan)
        if run.channel is not None:
            *rows, hidden = message_shape(run.config, run.layout, run.config.data.seq_length, 1)
            shape = (*rows, hidden + teacher.hidden)
            run.channel = run.channel.with_shapes(lambda micro_batch: shape)
        if run.layout.world.rank == 0:
            print_line(f"  teacher: {teacher.name}, {teacher.description}")


def split_message(message: Tensor, teacher_width: int) -> tuple[Tensor, Tensor]:
    """Return the student's and the teacher's hidden states, [s, b, h] each, in a pipeline message.

    The gradient of the message is zero for the teacher's states.

    Args:
        message: Both hidden states side by side.
        teacher_width: The width of the teacher's hidden states.
    """
    student, teacher = message.split((message.shape[-1] - teacher_width, teacher_width), dim=-1)
    return student.contiguous(), teacher.detach().contiguous()


def top_log_probs_of(batch: Batch, context: Axis) -> TopLogProbs | None:
    """Return the teacher's top-k log-probabilities for this context rank's tokens [b, s].

    The result is `None` for held-out samples, which have no files of logits.
    """
    if TOP_IDS not in batch:
        return None
    parts = (batch[name] for name in (TOP_IDS, TOP_VALUES, TOP_REST))
    return TopLogProbs(*(split_sequence(part, context, dim=1) for part in parts))


def student_losses(
    logits: Tensor,
    batch: TokenBatch,
    teacher_output: Tensor | TopLogProbs,
    vocabulary: VocabularyPart,
    options: DistillationConfig,
) -> dict[str, Tensor]:
    """Return the sums of both losses over the labels that count, keyed by `LOSS_NAMES`.

    The values are logged and therefore not weighted, but their gradients are: the gradient of the
    sum equals the gradient of (1 - A) * cross entropy + A * divergence. A token whose logits could
    not be read contributes its full cross entropy and no divergence.

    Args:
        logits: The student's logits [b, s, v/t]. Their gradient overwrites them.
        batch: This context rank's labels and loss mask.
        teacher_output: The teacher's logits [b, s, v/t], or its top k for these tokens.
        vocabulary: The tensor axis, and the size of the vocabulary without padding.
        options: The weights and the temperature.
    """

    def by_position(x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    weight: Tensor | float = options.kd_loss_alpha
    if isinstance(teacher_output, TopLogProbs):
        weight = weight * (teacher_output.ids >= 0).any(-1)
        teacher_output = TopLogProbs(*map(by_position, teacher_output))
    else:
        teacher_output = by_position(teacher_output)
    losses = distillation_losses(
        by_position(logits),
        by_position(batch.labels),
        teacher_output,
        vocabulary,
        temperature=options.kd_temperature,
        reuse_logits=True,
    )
    cross_entropy, divergence = map(by_position, losses)
    return {
        LOSS_NAMES[0]: _weighted_sum(cross_entropy, batch.loss_mask, 1 - weight),
        LOSS_NAMES[1]: _weighted_sum(divergence, batch.loss_mask, weight),
    }


def _weighted_sum(losses: Tensor, mask: Tensor, weight: Tensor | float) -> Tensor:
    """Return the sum of losses * mask, with the gradient of the sum of losses * mask * weight."""
    differentiated = (losses * mask * weight).sum()
    return (losses * mask).sum().detach() + (differentiated - differentiated.detach())
