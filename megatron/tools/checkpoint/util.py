r"""Convert checkpoints between Megatron-LM's, Hugging Face's and our formats.

    python tools/checkpoint/util.py --model-type GPT --loader llama2_hf --saver native \
        --load-dir Llama-2-7b-hf --save-dir checkpoints/llama2-7b --verify
    python tools/checkpoint/util.py --model-type GPT --loader native --saver hf \
        --load-dir checkpoints/finetuned --save-dir exported

    python tools/checkpoint/util.py --model-type GPT --loader native --saver megatron \
        --load-dir checkpoints/mine --save-dir checkpoints/megatron --keep-optimizer \
        --target-tensor-parallel-size 2 --target-pipeline-parallel-size 2

    python tools/checkpoint/util.py --model-type GPT --loader native --saver torch_dist \
        --load-dir checkpoints/mine --save-dir checkpoints/core --keep-optimizer

Only weights are converted unless --keep-optimizer is given. Nothing is downloaded, and no code in a
folder is run. A native checkpoint loads in any layout and needs no --target flags; Megatron's files
are split as the --target flags specify.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.command import run_command
from megatron.config.arguments import ToolParser, add_flags
from megatron.config.data import TokenizerConfig
from megatron.durable import writing_to
from megatron.errors import CheckpointError, ConfigError
from megatron.tools.checkpoint.verify import TOLERANCE, TOLERANCE_HELP, check_tolerance, verify

if TYPE_CHECKING:
    from megatron.tools.checkpoint import formats

MODELS = ("GPT", "BERT", "T5", "RETRO")
LOADERS = ("native", "megatron", "hf", "llama2_hf")
SAVERS = ("native", "megatron", "torch_dist", "hf", "peft")
# The names of the families in `huggingface.families`, which is slow to import.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next"),
    *("olmoe", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3", "gpt_neox", "stablelm"),
    *("gptj", "cohere", "cohere2", "bloom", "falcon", "gpt_oss", "llama4_text", "deepseek_v2"),
    *("deepseek_v3", "mamba2", "nemotron_h", "falcon_h1", "gpt2", "bert", "t5"),
)
_HF = ("hf", "llama2_hf")
_SHARD = "5GB"
_TARGETS = {  # how Megatron-LM's files are split
    "target_tensor_parallel_size": "Tensor-parallel ranks of the files. Default: as in the source.",
    "target_pipeline_parallel_size": "Pipeline stages of the files. Default: as in the source.",
    "target_pipeline_parallel_split_rank": "Stage on which a T5's decoder begins. Default: as in "
    "the source or, with a different number of stages, the stage of an even split.",
    "target_num_layers_per_virtual_pipeline_stage": "Layers of each virtual stage. Default: no "
    "virtual stages.",
}
_IN_FOLDER = "omit it: it is known from --load-dir"
# Flags of Megatron's loaders and savers that this tool does not have.
_UNSUPPORTED_FLAGS = {
    "--target-expert-parallel-size": "use --saver native or torch_dist, whose files load in any "
    "layout, and --expert-model-parallel-size in the run that loads them",
    "--loader-transformer-impl": "omit it: both implementations' files are recognized",
    "--saver-transformer-impl": "omit it: use --saver torch_dist for Megatron Core",
    "--model-size": _IN_FOLDER,
    "--checkpoint-type": "use --loader hf with Hugging Face's folder of the model, because Meta's "
    "own files cannot be read",
    "--position-embedding-type": _IN_FOLDER,
    "--bf16": "omit it: weights keep the type of the source",
    "--fp16": "omit it: weights keep the type of the source",
    "--make-vocab-size-divisible-by": "omit it: the run that loads the weights pads its vocabulary "
    "with this flag",
}


def build_parser() -> ToolParser:
    """Build the command-line parser, with Megatron's flags and ours."""
    parser = ToolParser("util.py", __doc__, _UNSUPPORTED_FLAGS)
    add = parser.add_argument
    add("--model-type", required=True, choices=MODELS, help="Kind of model.")
    add("--loader", default="megatron", choices=LOADERS, help="Format to read.")
    add("--saver", default="megatron", choices=SAVERS, help="Format to write.")
    add("--load-dir", required=True, type=Path, help="Folder to read.")
    parser.add_trust()
    add("--save-dir", required=True, type=Path, help="Folder to write.")
    add("--true-vocab-size", type=int, help="Rows of the vocabulary to keep, without the padding.")
    text = "Also convert the states of the optimizer and of the learning-rate schedule."
    add("--keep-optimizer", action="store_true", help=text)
    text = "Convert the averaged weights (--ema-decay, --lawa-interval) instead of the latest ones."
    add("--load-averaged-weights", action="store_true", help=text)
    add = parser.add_argument_group("To Megatron-LM").add_argument
    for name, text in _TARGETS.items():
        add(_flag(name), type=int, help=text)
    add = parser.add_argument_group("To Hugging Face").add_argument
    text = f"Largest file, for example 500MB. Default: {_SHARD}."
    add("--max-shard-size", default=_SHARD, help=text)
    text = "Family to write. Default: the original one or, if there is none, the first that fits."
    add("--model-family", choices=FAMILIES, help=text)
    text = (
        "Folder with config.json and tokenizer files of the original model. Default: the folder "
        "made by an import, if it has the checkpoint's tokenizer."
    )
    add("--hf-files", type=Path, help=text)
    add = parser.add_argument_group("Check").add_argument
    add("--verify", action="store_true", help="Compare logits with those of transformers.")
    add("--verify-tolerance", type=float, default=TOLERANCE, help=TOLERANCE_HELP)
    add_flags(parser, TokenizerConfig)
    add = parser.add_argument_group("Flags of Megatron-LM that have no effect here").add_argument
    add("--megatron-path")
    add("--max-queue-size", type=int)
    add("--no-checking", action="store_true")
    return parser


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def notices(options: argparse.Namespace) -> Iterator[str]:
    """Yield a message for each given flag that has no effect."""
    for name in _TARGETS if options.saver != "megatron" else ():
        value = getattr(options, name)
        if value is not None:
            any_layout = "the written checkpoint loads in any layout"
            yield f"{_flag(name)} {value}: no effect: {any_layout}"
    if options.saver not in ("hf", "peft") and options.model_family is not None:
        yield f"--model-family {options.model_family}: no effect: it is for --saver hf and peft"
    if options.saver != "hf" and options.max_shard_size != _SHARD:
        yield f"--max-shard-size {options.max_shard_size}: no effect: it is for --saver hf"
    if options.hf_files is not None and options.loader in _HF:
        yield f"--hf-files {options.hf_files}: no effect: --load-dir has its own files"
    if options.megatron_path is not None:
        yield f"--megatron-path {options.megatron_path}: not needed: none of its code is imported"
    if options.max_queue_size is not None:
        yield f"--max-queue-size {options.max_queue_size}: there is no queue: one process converts"
    if options.no_checking:
        yield "--no-checking: names and shapes are always checked"


def run(options: argparse.Namespace) -> Iterator[str]:
    """Convert the checkpoint, and yield messages for the user.

    Raises:
        UserError: The source cannot be read or expressed in the target's format, or the result
            cannot be written.
    """
    from megatron.config.rules_legacy import unsupported_state, unused_by_core
    from megatron.tools.checkpoint import formats

    if options.verify and (options.loader in _HF) == (options.saver in _HF):
        raise ConfigError(
            "--verify compares our model with Hugging Face's: exactly one of --loader and --saver "
            "must be a Hugging Face format"
        )
    check_tolerance("--verify-tolerance", options.verify_tolerance)
    if options.keep_optimizer and (options.loader in _HF or options.saver in _HF):
        raise ConfigError("--keep-optimizer: a Hugging Face folder has only weights: drop the flag")
    for name in (*_TARGETS, "true_vocab_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} {value}: must be at least 1")
    formats.check_target(options)
    formats.check_companions(options)
    yield from notices(options)
    source = formats.LOADERS[options.loader](options)
    architecture = source.config.model.architecture
    if architecture != options.model_type.lower():
        raise ConfigError(
            f"--model-type {options.model_type}: {source.reader.path} is a {architecture.upper()}: "
            f"give --model-type {architecture.upper()}"
        )
    formats.check_vocabulary(source, options)
    if options.saver in ("megatron", "torch_dist"):
        yield from unused_by_core(source.config.model)
    if options.saver == "megatron":
        yield from megatron_notices(source, keep_optimizer=options.keep_optimizer)
    elif options.saver == "hf":
        yield from hf_notices(source, options)
    elif options.saver == "torch_dist" and options.keep_optimizer:
        yield from unsupported_state(source.config.precision, None, "--saver torch_dist")
    if options.keep_optimizer and not source.reader.meta.get("optimizer"):
        raise CheckpointError(
            f"--keep-optimizer: {source.reader.path} has no optimizer state for the weights to "
            "convert (averaged weights and merged adapters never have one): drop the flag"
        )
    results: list[str] = []

    def check(written: Path) -> None:
        results.append(_verify(source, options, written))

    with writing_to("--save-dir", options.save_dir):
        path = formats.SAVERS[options.saver](source, options, check if options.verify else None)
    yield f"{source.reader.path} -> {path}"
    yield from results


def hf_notices(source: formats.SourceModel, options: argparse.Namespace) -> Iterator[str]:
    """Yield a message if a Hugging Face folder cannot have all layers of the model."""
    from megatron.tools.checkpoint.formats import hf_export

    if source.config.model.mtp_num_layers:
        export = hf_export(source, options)
        if not export.model.mtp_num_layers:
            yield (
                f"--saver hf: a {export.family.name} model has no layers for multi-token "
                "prediction: they are left out, and the model predicts the next token as before"
            )


def megatron_notices(source: formats.SourceModel, *, keep_optimizer: bool) -> Iterator[str]:
    """Yield a message for everything that Megatron-LM computes differently or cannot restore."""
    from megatron.checkpoint.legacy.writer import notices as network_notices
    from megatron.config.rules_legacy import unsupported_state

    yield from network_notices(source.config.model)
    if keep_optimizer:
        style = (source.reader.meta.get("schedule") or {}).get("lr_decay_style")
        yield from unsupported_state(source.config.precision, style, "--saver megatron")


def _verify(source: formats.SourceModel, options: argparse.Namespace, written: Path) -> str:
    """Compare the checkpoint at the temporary path `written` with the source."""
    from megatron.checkpoint.loading import open_checkpoint

    if options.saver == "hf":
        folder, reader = written, source.reader
    else:
        opened = open_checkpoint(written)
        assert opened is not None, "it was written just now"
        folder, reader = options.load_dir, opened
    return verify(
        reader,
        source.config,
        folder,
        tolerance=options.verify_tolerance,
        allow_foreign=options.allow_foreign_checkpoints,
    )


def main(argv: Sequence[str] | None = None, program: str = "util.py") -> int:
    """Run the conversion and return the exit code."""
    parser = build_parser()
    parser.prog = program
    options = parser.read(argv)

    def work() -> None:
        for line in run(options):
            print(line, flush=True)

    return run_command(work)
