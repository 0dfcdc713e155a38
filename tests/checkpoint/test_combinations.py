"""Checkpoints of random networks load in other layouts and convert to other formats bit for bit.

Other tests try each kind of network alone or in combinations known to matter. To try more:

    python -m tests.checkpoint.test_combinations --count 200 --seed 1
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.loading import open_any
from megatron.checkpoint.merged import without_adapters
from megatron.checkpoint.reader import Reader
from megatron.config.checkpoint import AVERAGES
from megatron.config.parser import parse_config
from megatron.errors import UserError
from megatron.models.adapters import adapted_layers
from megatron.parallel.layout import Layout
from megatron.tools.checkpoint import util
from megatron.training.checkpointing import save_run
from megatron.training.loop import standard_callbacks, train
from megatron.training.restoring import network_of
from tests.checkpoint.states import read_whole
from tests.combinations import try_combinations
from tests.distributed import run_sharing_memory, toy_device
from tests.models.drawn import Network, draw_network
from tests.training.toy import FLAGS_BY_KIND, TOY, Recorder, build_toy, train_toy

VOCAB = 100
Training = Callable[[Layout, str, Sequence[str]], list[float]]
_PRECISIONS = ["", "", "", "", "--bf16", "--fp16", "--bf16 --embedding-weights-in-fp32"]
_TRAININGS = [
    *("", "", "", "", "--optimizer sgd", "--optimizer muon", "--use-distributed-optimizer"),
    *("--lora-rank 2", "--lora-rank 2 --use-dora", "--lora-rank 2 --use-rslora --lora-alpha 3"),
    "--lora-rank 2 --lora-target-modules all-linear output_layer",
    "--lora-rank 2 --lora-target-modules layers.*.attention layers.0.mlp",
    *("--freeze embedding", "--freeze layers.0 --use-distributed-optimizer", "--ema-decay 0.5"),
]
_TENSOR = "--tensor-model-parallel-size 2"
_PIPELINE = "--pipeline-model-parallel-size 2"
_LAYOUTS = [
    (1, "--recompute-granularity full --recompute-method uniform"),
    *((2, "--zero-stage 1"), (2, "--zero-stage 2"), (2, "--zero-stage 3"), (2, _TENSOR)),
    *((2, f"{_TENSOR} --sequence-parallel"), (2, _PIPELINE), (2, "--context-parallel-size 2")),
    (2, f"{_PIPELINE} --num-layers-per-virtual-pipeline-stage 1"),
    (2, f"{_PIPELINE} --pipeline-schedule zero-bubble"),
    (2, "--expert-model-parallel-size 2"),
    (2, f"{_TENSOR} --sequence-parallel --expert-tensor-parallel-size 1"),
    (
        2,
        f"{_TENSOR} --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --zero-stage 3",
    ),
]
_SIZES = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
    "--expert-tensor-parallel-size": "expert_tensor",
}
_DEFAULTS = """
    --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --train-iters 4 --save-interval 2
    --lr 0.02 --global-batch-size 2
""".split()


@dataclass(frozen=True)
class Combination:
    """A network, how it is trained, and in which two layouts.

    Attributes:
        network: The network.
        flags: Flags of the network and of its training.
        layouts: The number of processes and the flags of both layouts.
    """

    network: Network
    flags: list[str]
    layouts: tuple[tuple[int, str], tuple[int, str]]

    def __str__(self) -> str:
        layouts = " -> ".join(f"{count} processes {flags}" for count, flags in self.layouts)
        return f"{self.network.kind} {self.network.family}: {' '.join(self.flags)}: {layouts}"

    @property
    def tolerance(self) -> float:
        """Return the allowed relative difference between the losses of two layouts."""
        return 2e-2 if {"--bf16", "--fp16"} & set(self.flags) else 1e-4

    def words(self, layout: int) -> list[str]:
        """Return the command line of a run in one of the layouts."""
        return [*_DEFAULTS, *self.flags, *self.layouts[layout][1].split()]


def combination(seed: int) -> Combination:
    """Draw combinations until the rules of the configuration accept one."""
    rng = random.Random(seed)
    while True:
        kind = rng.choice(["gpt"] * 6 + ["bert", "t5"])
        network = draw_network(rng, kind)
        flags = f"{network.flags} {rng.choice(_PRECISIONS)} {rng.choice(_TRAININGS)}".split()
        layouts = (1, ""), (1, "")
        if rng.random() < 0.4:
            layouts = rng.choice(_LAYOUTS), rng.choice(_LAYOUTS)
        found = Combination(network, flags, layouts)
        if all(_refusal(found, layout) is None for layout in (0, 1)):
            return found


def _refusal(found: Combination, layout: int, *more: str) -> str | None:
    kind = found.network.kind
    words = [*TOY, *FLAGS_BY_KIND[kind], *found.words(layout), *more]
    try:
        parse_config(
            words,
            world_size=found.layouts[layout][0],
            architecture=kind,
            read_checkpoint=network_of,
        )
    except UserError as error:
        return str(error)
    return None


def _train(layout: Layout, kind: str, words: Sequence[str]) -> list[float]:
    return train_toy(layout, words, kind)[0].values("lm loss")


def _save_and_train(layout: Layout, kind: str, words: Sequence[str]) -> list[float]:
    """Load a checkpoint, save it again before anything changes, and train to the end."""
    run, recorder = build_toy(layout, words, kind), Recorder()
    save_run(run)
    train(run, standard_callbacks(run, [recorder])[0])
    return recorder.values("lm loss")


def _run(found: Combination, layout: int, function: Training, *more: str) -> list[float] | str:
    """Run in one of the layouts; return the losses, or the message of a refusal."""
    processes, _ = found.layouts[layout]
    words = [*found.words(layout), *more]
    sizes = {_SIZES[word]: int(words[i + 1]) for i, word in enumerate(words) if word in _SIZES}
    if "expert_tensor" not in sizes and "tensor" in sizes:
        sizes["expert_tensor"] = sizes["tensor"]
    try:
        if processes == 1:
            return function(Layout.single(), found.network.kind, words)
        # The last rank has the losses of a pipeline.
        return run_sharing_memory(processes, function, found.network.kind, words, **sizes)[-1]
    except UserError as error:
        return str(error)
    except RuntimeError as error:
        if "megatron.errors." in str(error):  # raised by a rank
            return str(error)
        raise


def convert(found: Combination, loader: str, saver: str, *more: str | Path) -> str:
    """Convert, and return the message of a refusal, or "". Other errors are not caught."""
    words = ["--model-type", found.network.kind.upper(), "--loader", loader, "--saver", saver]
    try:
        list(util.run(util.build_parser().read([*words, *map(str, more)])))
    except UserError as error:
        if re.search("[A-Z][a-z]+Error", str(error)):
            raise RuntimeError("an exception as a message") from error
        return str(error)
    return ""


def differences(one: Reader, other: Reader, prefix: str = "") -> list[str]:
    """Return a line for each tensor that is not the same, apart from padding rows of words."""
    names = [
        {n for n in reader.names() if n.startswith(prefix) and not n.startswith(AVERAGES)}
        for reader in (one, other)
    ]
    # Megatron has masters of frozen weights, too.
    extra = {name for name in names[1] - names[0] if name.endswith(".master")}
    lines = [f"{name} is only in one of them" for name in sorted((names[0] ^ names[1]) - extra)]
    for name in sorted(names[0] & names[1]):
        first, second = read_whole(one, name), read_whole(other, name)
        if first.shape != second.shape and first.shape[1:] == second.shape[1:]:
            first, second = first[:VOCAB], second[:VOCAB]
        if first.dtype != second.dtype or not torch.equal(first, second):
            lines.append(f"{name}: {first.dtype} {tuple(first.shape)} differs")
    return lines


def _is_close(found: Combination, losses: list[float] | str, expected: list[float]) -> bool:
    return losses == pytest.approx(expected, rel=found.tolerance)


def problems_of(found: Combination, folder: Path) -> Iterator[str]:
    """Train, and yield each problem with the saved checkpoint."""
    first = folder / "first"
    losses = _run(found, 0, _train, "--save", str(first))
    if isinstance(losses, str):
        print(f"refused: {losses}")
        return
    saved = first / "iter_0000002"
    if found.layouts[0] != found.layouts[1]:
        yield from _problems_of_resharding(found, saved, folder / "second", losses)
    for saver in ("megatron", "torch_dist"):
        yield from _problems_of_megatron(found, saver, saved, folder / saver, losses)
    yield from _problems_of_hugging_face(found, saved, folder)


def _problems_of_resharding(
    found: Combination, saved: Path, folder: Path, losses: list[float]
) -> Iterator[str]:
    """Load in the other layout, save there, and load that in the first layout."""
    other = _run(found, 1, _save_and_train, "--load", str(saved), "--save", str(folder))
    drops = "--moe-expert-capacity-factor" in found.flags  # by layout (docs/experts.md)
    if not drops and not _is_close(found, other, losses[2:]):
        yield f"losses {losses}, in another layout {other}"
    resharded = folder / saved.name
    lines = differences(open_any(saved), open_any(resharded))
    if lines:
        yield f"another layout saves {lines}"
    again = _run(found, 0, _train, "--load", str(resharded))
    if again != losses[2:]:
        yield f"losses {losses}, from a checkpoint of another layout {again}"


def _problems_of_megatron(
    found: Combination, saver: str, saved: Path, folder: Path, losses: list[float]
) -> Iterator[str]:
    """Write one of Megatron's formats, read it back, and train on from it."""
    merges = "--lora-rank" in found.flags
    more = [] if merges else ["--keep-optimizer"]
    refusal = convert(found, "native", saver, "--load-dir", saved, "--save-dir", folder, *more)
    form = "legacy" if saver == "megatron" else saver
    rule = _refusal(found, 0, "--save", str(folder), "--ckpt-format", form)
    if refusal:
        print(f"refused: {saver}: {refusal}")
        left = {path.name for path in folder.rglob("*")} - {"save.lock"}
        if left:
            yield f"{saver}: {left} are left after a refusal: {refusal}"
        if rule is None:
            yield f"{saver}: only the converter refuses: {refusal}"
        return
    back = folder.with_name(f"{saver} and back")
    message = convert(found, "megatron", "native", "--load-dir", folder, "--save-dir", back, *more)
    if message:
        yield f"{saver}: its own files are refused: {message}"
        return
    lines = differences(_merged(saved), open_any(back), "model." if merges else "")
    if lines:
        yield f"{saver}: {lines}"
    if not merges and found.layouts[0][0] == 1:
        resumed = _run(found, 0, _train, "--load", str(folder))
        if resumed != losses[2:]:
            yield f"{saver}: losses {losses}, from its files {resumed}"


def _problems_of_hugging_face(found: Combination, saved: Path, folder: Path) -> Iterator[str]:
    """Export, compare with `transformers`, and import again."""
    exported, back = folder / "exported", folder / "imported"
    where = "--load-dir", saved, "--save-dir", exported
    refusal = convert(found, "native", "hf", *where, "--verify")
    if refusal:
        print(f"refused: hf: {refusal}")
        is_expected = "no family can express this network" in refusal
        if not is_expected or found.network.family:
            yield f"hf: {refusal}"
        return
    refusal = convert(found, "hf", "native", "--load-dir", exported, "--save-dir", back, "--verify")
    if refusal:
        yield f"hf: its own files are refused: {refusal}"
        return
    ours, theirs = _merged(saved), open_any(back)
    lines = differences(ours, theirs, "model.")
    if not any(name.startswith("model.mtp.") for name in theirs.names()):
        lines = [line for line in lines if not line.startswith("model.mtp.")]  # left out
    if lines:
        yield f"hf: {lines}"
    if "--lora-rank" in found.flags and found.network.kind == "gpt":
        refusal = convert(found, "native", "peft", "--load-dir", saved, "--save-dir", folder / "p")
        if refusal:
            yield f"peft: {refusal}"


def _merged(folder: Path) -> Reader:
    return without_adapters(open_any(folder), adapted_layers)


@pytest.mark.skipif(toy_device().is_gpu, reason="conversions run on a CPU")
@pytest.mark.parametrize("seed", range(3))
def test_checkpoints_of_random_networks(seed: int, tmp_path: Path) -> None:
    found = combination(seed)
    problems = list(problems_of(found, tmp_path))
    assert not problems, f"{found}\n{problems}"


if __name__ == "__main__":
    sys.exit(try_combinations(__doc__.splitlines()[0], combination, problems_of))
