#!/usr/bin/env python3
"""Group relative policy optimization (Shao et al., 2024, arXiv:2402.03300) for a GPT.

python examples/grpo/grpo.py --reward examples/grpo/sort_digits.py --data-path prompts.jsonl ...

--reward names a Python file with a function `reward(record, answer) -> float`. record is the line
of --data-path with the prompt, and answer is the model's text. Besides the flags that --help lists,
all flags of pretrain_gpt.py are accepted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.sample import TRAINED
from megatron.finetuning.rollouts import (
    ADVANTAGES,
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    REWARDS,
    WEIGHTS,
    Group,
    Judged,
    RolloutRecipe,
    Rollouts,
)
from megatron.finetuning.teacher import load_teacher
from megatron.inference.request import Sampling
from megatron.parallel.collectives import all_reduce
from megatron.training.pretrain import main
from megatron.training.recipe import Batch
from megatron.training.run import Run

Reward = Callable[[Mapping[str, Any], str], float]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this example's flags."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--reward", type=Path, required=True, help="Python file with the reward function")
    add("--group-size", type=int, default=8, help="number of answers to each prompt")
    add("--answer-tokens", type=int, default=64, help="maximum number of tokens in an answer")
    add("--answers-at-once", type=int, default=256, help="answers to generate at once")
    text = "form of the loss, named like TRL's loss_type"
    add("--loss", choices=("grpo", "dr_grpo", "dapo"), default="grpo", help=text)
    add("--clip", type=float, default=0.2, help="how far ratios may fall below 1")
    add("--clip-high", type=float, help="how far ratios may rise above 1 (default: --clip)")
    add("--kl", type=float, default=0.0, help="weight of the divergence from --reference")
    add("--reference", help="folder of the reference model's checkpoint")
    add("--updates-per-rollout", type=int, default=1, help="updates per set of answers")
    return parser


def advantages(rewards: Tensor, *, scaled: bool) -> Tensor:
    """Return the advantages of a group, fp32 [G]: how much each reward exceeds the mean.

    Args:
        rewards: The rewards of a group, [G].
        scaled: Whether to divide by the standard deviation of the rewards. Dr. GRPO does not.
    """
    centered = rewards - rewards.mean()
    return centered / (rewards.std() + 1e-4) if scaled else centered


def token_losses(
    log_probs: Tensor,
    old: Tensor,
    advantage: Tensor,
    clip: tuple[float, float],
    kl: float = 0.0,
    reference: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and 1 for each token that clipping leaves without a gradient.

    All tensors have the same shape.

    Args:
        log_probs: Log-probabilities under the policy.
        old: Log-probabilities under the policy that wrote the tokens.
        advantage: The advantage of each token's answer.
        clip: How far the ratio of the two probabilities may fall below 1 and rise above 1.
        kl: The weight of the divergence from the reference.
        reference: Log-probabilities under the reference model, if `kl` is not 0.
    """
    ratio = (log_probs - old).exp()
    free, bounded = ratio * advantage, ratio.clamp(1 - clip[0], 1 + clip[1]) * advantage
    losses = -torch.minimum(free, bounded)
    if reference is not None:
        gap = reference - log_probs
        losses = losses + kl * (gap.exp() - gap - 1)
    return losses, (bounded < free).double()


class GRPO(RolloutRecipe):
    """The training recipe: the loss of a micro-batch, and the values that are logged with it."""

    program = "grpo.py"

    def __init__(self, options: argparse.Namespace) -> None:
        """Store the options."""
        high = options.clip if options.clip_high is None else options.clip_high
        self._options, self._clip = options, (options.clip, high)

    def loss_names(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the logged values."""
        return ("loss", "reward", "answer tokens", "clipped", "log-ratio")

    def losses(self, log_probs: Tensor, batch: Batch) -> Mapping[str, Tensor]:
        """Return the loss of a micro-batch, and means over its answers for the log."""
        old, reference = batch[OLD_LOG_PROBS], batch.get(REFERENCE_LOG_PROBS)
        values, clipped = token_losses(
            log_probs, old, batch[ADVANTAGES], self._clip, self._options.kl, reference
        )
        rows, tokens = len(values), batch[TRAINED].sum().double()
        found = {
            "loss": (values * batch[WEIGHTS]).sum() / rows,
            "reward": batch[REWARDS].sum() / rows,
            "answer tokens": tokens / (rows * self._options.group_size),
            "clipped": (clipped * batch[TRAINED]).sum() / tokens,
            "log-ratio": (log_probs - old).detach().abs().sum() / tokens,
        }
        return {name: value.float() for name, value in found.items()}


class GRPORollouts(Rollouts):
    """The rewards of answers, and their advantages over the other answers to the same prompt."""

    def __init__(self, options: argparse.Namespace, recipe: GRPO, reward: Reward) -> None:
        """Store the options, the recipe and the reward function."""
        sampling = Sampling(max_new_tokens=options.answer_tokens)
        sizes = {"group_size": options.group_size, "updates": options.updates_per_rollout}
        super().__init__(sampling, **sizes, at_once=options.answers_at_once)
        self._options, self._recipe, self._reward = options, recipe, reward

    def begin(self, run: Run) -> None:
        """Load the reference model. Collective."""
        super().begin(run)
        folder, place = self._options.reference, (run.config, run.tokenizer, run.device, run.layout)
        if folder is not None:
            self._recipe.reference = load_teacher(folder, *place, flag="--reference")

    def judge(self, run: Run, groups: Sequence[Group]) -> list[list[Judged]]:
        """Return each answer's reward, advantage and weight. Collective over the data axis."""
        kind, size = self._options.loss, self._options.group_size
        written = sum(len(answer.tokens) for group in groups for answer in group.answers)
        total = torch.tensor([written, len(groups)], device=run.device.torch_device)
        tokens, rows = all_reduce(total, run.layout.data).tolist()
        judged = []
        for group in groups:
            rewards = torch.tensor([float(self._reward(group.record, x)) for x in group.texts])
            gains = advantages(rewards, scaled=kind != "dr_grpo").tolist()
            weights = {
                "grpo": [1 / (size * len(a.tokens)) for a in group.answers],
                "dr_grpo": [1 / (size * self._options.answer_tokens)] * size,
                "dapo": [rows / tokens] * size,
            }[kind]
            judged.append([*map(Judged, rewards.tolist(), gains, weights)])
        return judged


def load_reward(path: Path) -> Reward:
    """Load the function `reward` from a Python file, or exit with a message if there is none."""
    spec = importlib.util.spec_from_file_location("task", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(
            f"--reward {path}: not a Python file: give one that defines reward(record, answer)"
        )
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    if not callable(reward := getattr(task, "reward", None)):
        raise SystemExit(f"--reward {path}: it defines no function reward(record, answer): add one")
    return reward


def read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of this example's flags, and the remaining arguments."""
    parser = build_parser()
    options, flags = parser.parse_known_args(arguments)
    for name in ("group_size", "answer_tokens", "answers_at_once", "updates_per_rollout"):
        least = 2 if name == "group_size" else 1
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {value}: give {least} or more")
    if bool(options.kl) != (options.reference is not None):
        parser.error(f"--kl {options.kl:g}, --reference {options.reference}: give both or neither")
    return options, flags


if __name__ == "__main__":
    options, flags = read_options(sys.argv[1:])
    recipe = GRPO(options)
    sys.exit(main(recipe, flags, extras=GRPORollouts(options, recipe, load_reward(options.reward))))
