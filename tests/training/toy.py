"""A toy run in this process or in several, for tests of the training loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.config.parser import parse_config
from megatron.device import Device
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.expert_load import ExpertLoad
from megatron.training.loop import standard_callbacks, train
from megatron.training.recipe import Recipe
from megatron.training.restoring import network_of
from megatron.training.run import Run
from megatron.training.step import StepOutcome
from megatron.training.writers import RunStart
from pretrain_bert import BertRecipe
from pretrain_gpt import GPTRecipe
from pretrain_ict import ICTRecipe
from pretrain_retro import RetroRecipe
from pretrain_t5 import T5Recipe
from tests.distributed import as_given, toy_device

TOY = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4
    --lr 1e-2 --lr-decay-style cosine --lr-warmup-fraction 0.2 --min-lr 1e-3
    --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --make-vocab-size-divisible-by 8
    --num-workers 0 --log-interval 1 --eval-interval 3 --eval-iters 1
""".split()


CPU = Device.cpu()
RECIPES: dict[str, Recipe] = {
    "gpt": GPTRecipe(),
    "bert": BertRecipe(),
    "t5": T5Recipe(),
    "ict": ICTRecipe(),
    "retro": RetroRecipe(),
}


class SpoiledRecipe(GPTRecipe):
    """A GPT's training in which the loss of some samples is multiplied."""

    def __init__(self, samples: frozenset[int]) -> None:
        self._samples = samples

    def forward(self, part: Any, batch: Any, *rest: Any) -> Any:
        result = super().forward(part, batch, *rest)
        if isinstance(result, torch.Tensor) or self._samples.isdisjoint(batch["id"].tolist()):
            return result
        return {name: 8 * value for name, value in result.items()}


FLAGS_BY_KIND: dict[str, list[str]] = {
    "gpt": [],
    "bert": [],
    "t5": "--decoder-seq-length 12 --lr 2e-3 --min-lr 2e-4".split(),
    "retro": "--num-layers 6 --eval-iters 0 --split 100,0,0".split(),
    "ict": "--micro-batch-size 4 --lr 2e-3 --min-lr 2e-4".split(),
}


class Recorder:
    """A writer that keeps everything that it receives."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.loads: dict[int, ExpertLoad] = {}
        self.starts: list[RunStart] = []
        self.events: list[tuple[int, str, str]] = []

    def write(self, scalars: Mapping[str, float], iteration: int, samples: int, **_: bool) -> None:
        self.records.append({"iteration": iteration, "consumed samples": samples, **scalars})

    def write_expert_load(self, load: ExpertLoad, iteration: int, samples: int) -> None:
        self.loads[iteration] = load

    def write_start(self, start: RunStart, iteration: int, samples: int) -> None:
        self.starts.append(start)

    def write_event(self, kind: str, text: str, iteration: int, samples: int) -> None:
        self.events.append((iteration, kind, text))

    def close(self) -> None:
        pass

    def values(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]


def build_toy(
    layout: Layout,
    arguments: Sequence[str] = (),
    kind: str = "gpt",
    device: Device | None = None,
) -> Run:
    """Return a run of the toy model of this kind; later flags override the toy's own.

    Args:
        layout: The layout.
        arguments: Flags in addition to the toy's.
        kind: The kind of network.
        device: The device, by default the one that `tests.distributed` selects.
    """
    size, rank = layout.world.size, layout.world.rank
    device = device or toy_device(rank)
    # A Retro model's data is in its working folder.
    has_data = kind == "retro" or not {"--data-path", "--train-data-path"}.isdisjoint(arguments)
    toy_flags = [flag for flag in TOY if not (has_data and flag == "--mock-data")]
    flags = [*toy_flags, *FLAGS_BY_KIND[kind], *arguments]
    lengths = {"--train-samples", "--train-iters", "--train-tokens", "--lr-wsd-branch-from"}
    flags += [] if lengths & set(flags) else ["--train-iters", "6"]
    flags += [] if "--exit-signal-handler" in flags else ["--no-exit-signal-handler"]
    parsed = parse_config(flags, world_size=size, architecture=kind, read_checkpoint=network_of)
    layout = as_given(layout, parsed.config)
    return build_run(parsed.config, RECIPES[kind], device, layout)


def train_toy(
    layout: Layout,
    arguments: Sequence[str] = (),
    kind: str = "gpt",
    device: Device | None = None,
) -> tuple[Recorder, Run]:
    """Train the toy to the end; return this rank's records and the run."""
    run, recorder = build_toy(layout, arguments, kind, device), Recorder()
    callbacks, _ = standard_callbacks(run, [recorder])
    train(run, callbacks)
    return recorder, run


def losses_of(layout: Layout, arguments: Sequence[str] = ()) -> list[float]:
    """Train the toy to the end; return its losses."""
    recorder, _ = train_toy(layout, arguments)
    return recorder.values("lm loss")


def losses_and_norms_of(layout: Layout, flags: str) -> tuple[list[float], list[float]]:
    """Train the toy to the end; return its losses and the norms of its gradients."""
    recorder, _ = train_toy(layout, flags.split())
    return recorder.values("lm loss"), recorder.values("grad-norm")


def fingerprint(run: Run) -> str:
    """Return a digest of parameters, optimizer state and position."""
    digest = hashlib.sha256(repr(run.progress).encode())
    shares = run.gradients.shares_weights  # this process's shards
    tensors = {
        name: run.gradients.part(p) if shares else p.detach() for name, p in run.named_parameters()
    }
    tensors |= {name: tensor for name, (tensor, _) in run.optimizer.named_tensors().items()}
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def toy_outcome(iteration: int = 1, **changes: Any) -> StepOutcome:
    """Return a successful update on 4 samples that no other iteration has, with these changes."""
    first = 4 * (iteration - 1)
    outcome = StepOutcome(
        applied=True,
        grad_norm=1.0,
        found_nonfinite=False,
        found_spike=False,
        overflow=False,
        zeros=None,
        losses={"lm loss": 2.0},
        layer_losses={},
        samples=4,
        tokens=64,
        flops=1e6,
        length=None,
        loss_scale=1.0,
        exit_requested=False,
        save_due=False,
        spike="",
        sample_ids=[[first + i] for i in range(4)],
        ordinary=[True] * 4,
        expert_load=None,
    )
    return replace(outcome, **changes)
