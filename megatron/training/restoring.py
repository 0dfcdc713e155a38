"""Opening the checkpoint that a run starts from, and restoring the run from it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.checkpoint.compatibility import check_network, check_states
from megatron.checkpoint.entries import (
    Entry,
    State,
    flatten,
)
from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.loading import checkpoints_below, open_root
from megatron.checkpoint.merged import AveragedReader
from megatron.checkpoint.non_persistent import RUN
from megatron.checkpoint.reader import SHOWN, PaddedReader, Reader, restore
from megatron.checkpoint.store import STATES
from megatron.command import print_line
from megatron.config import RunConfig
from megatron.config.adapters import ADAPTER_FIELDS, is_adapter_parameter
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.model import NETWORK_FIELDS, ModelOptions
from megatron.config.retro import is_retriever_parameter
from megatron.config.run import with_values
from megatron.config.yaml_file import from_dict
from megatron.data.text_stream import restore_positions
from megatron.errors import CheckpointError, ConfigError
from megatron.models.adapters import adapted_layers, initialize_adapters
from megatron.parallel.collectives import all_reduce
from megatron.parallel.layout import Layout
from megatron.tokenizer.build import vocabulary_multiple
from megatron.training.branches import open_trunk, resumed_schedules
from megatron.training.changed_settings import changed_corpus, changed_settings
from megatron.training.checkpointing import (
    average_state,
    history_state,
    optimizer_state,
    shard_state,
    weights_state,
)
from megatron.training.run import Progress, Run
from megatron.training.run_record import open_newest

_PADDING = ModelOptions.make_vocab_size_divisible_by
_SCORE = "model.score."  # a reward model's head
# The parameters that a new reward model keeps.
_REWARD_BODY = ("model.embedding.", "model.layers.", "model.final_norm.")
_ADAPTERS = "the adapters"  # in the log line about what finetuning initializes
# BERT's heads: the first ones predict masked tokens, the others the order of the segments.
_HEADS: tuple[str, ...] = ("model.head.", "model.output.")
_ORDER_HEADS = ("model.pooler.", "model.binary_head.")


def open_for_loading(config: RunConfig, layout: Layout) -> tuple[RunConfig, Reader | None]:
    """Open the checkpoint in --load, or return `None` if the run starts fresh. Collective.

    A run that resumes itself may open a newer non-persistent checkpoint (`open_newest`). If --load
    contains no checkpoint, that of --lr-wsd-branch-from or --pretrained-checkpoint is opened
    instead. With the latter, the configuration that is returned names it as --load, with
    --finetune.

    Raises:
        ConfigError: The folder does not exist or contains no checkpoint, although it is not the
            --save folder, or --finetune needs its weights.
        CheckpointError: The path is a file; there is no checkpoint, but
            --exit-on-missing-checkpoint is given; there is no checkpoint of the iteration in
            --ckpt-step; only subfolders of the folder contain checkpoints, and it is not --save or
            --finetune is given; all checkpoints are damaged; or the checkpoint is for a different
            network.
        StorageError: A folder of non-persistent checkpoints cannot be created.
    """
    if config.checkpoint.load is None:
        return config, None
    root, start_time = Path(config.checkpoint.load), time.perf_counter()
    options = config.checkpoint
    if os.path.isfile(root):
        raise CheckpointError(
            f"{_named_flag(options)} {root} is a file: give the folder of checkpoints"
        )
    step, allow_foreign = options.ckpt_step, options.allow_foreign_checkpoints
    reader = open_newest(
        config,
        layout,
        lambda: open_root(root, step=step, layout=layout, allow_foreign=allow_foreign),
    )
    trunk = config.schedule.lr_wsd_branch_from
    if reader is None and trunk is not None:
        reader = open_trunk(config, Path(trunk), layout)
    if reader is None:
        source = options.pretrained_checkpoint
        if source not in (None, options.load):
            values = {"checkpoint.load": source, "checkpoint.finetune": True}
            return open_for_loading(with_values(config, values), layout)
        _check_fresh_start(options)
        if layout.world.rank == 0:
            print_line(f"  --load {root} holds no checkpoint yet: this is the run's first start")
        return config, None
    if config.checkpoint.load_averaged_weights:
        reader = AveragedReader(reader)
    notices = check_network(config, reader, finetunes=config.checkpoint.finetune)
    if layout.world.rank == 0:
        for line in notices:
            print_line(line)
        seconds = time.perf_counter() - start_time
        size = sum(file.stat().st_size for file in reader.path.rglob("*")) / 1e9
        # Hugging Face files have no digests.
        verb = "opened" if reader.format == "hf" else "verified"
        print_line(f"  {reader.path}: {size:.3g} GB {verb} in {seconds:.2f} s")
    return config, reader


def _check_fresh_start(options: CheckpointConfig) -> None:
    """Check that a run may start from random weights, although --load is given.

    Before its first checkpoint, a run starts fresh in the folder that it saves to, no matter what
    else is in it: finetuning keeps its best weights in a subfolder.
    """
    assert options.load is not None
    root, flag = Path(options.load), _named_flag(options)
    is_saved_to = options.save is not None and Path(options.save).resolve() == root.resolve()
    is_first_start = is_saved_to and not options.finetune
    if not is_first_start and (below := checkpoints_below(root)):
        raise CheckpointError(
            f"{flag} {root}: there is no checkpoint in this folder, but its folder {below[0]} has "
            f"one: give {flag} {root / below[0]}, or drop {flag} to start from scratch"
        )
    if options.exit_on_missing_checkpoint:
        raise CheckpointError(f"{flag} {root}: there is no checkpoint in this folder")
    if is_first_start:
        return
    problem = f"{flag} {root} {'holds no checkpoint' if root.exists() else 'does not exist'}"
    if options.finetune:
        cause = "" if flag == "--pretrained-checkpoint" else "--finetune: "
        raise ConfigError(f"{cause}{problem}: give the folder of the weights to finetune")
    raise ConfigError(
        f"{problem}: correct the path, or drop --load to start from random weights (a run that "
        "resumes itself gives the same folder to --save)"
    )


def _named_flag(options: CheckpointConfig) -> str:
    """Return the flag that names the checkpoint to open."""
    is_pretrained = options.load == options.pretrained_checkpoint
    return "--pretrained-checkpoint" if is_pretrained else "--load"


def stored_entries(reader: Reader, entries: int) -> int:
    """Return the number of embedding rows that a checkpoint should have for a tokenizer.

    Hugging Face's BERT has no rows for [BOS] and [EOS], which our tokenizer adds to its vocabulary.

    Args:
        reader: The checkpoint.
        entries: The number of entries in the tokenizer.
    """
    is_foreign = reader.format == "hf" and reader.meta["config"]["model"]["architecture"] == "bert"
    return min(entries, int(reader.meta["padded_vocab_size"])) if is_foreign else entries


def network_of(options: CheckpointConfig) -> dict[str, Any]:
    """Return the network settings in a checkpoint by "model.field", for --use-checkpoint-args.

    Args:
        options: The checkpoint options, which include --load. If it contains no checkpoint,
            --pretrained-checkpoint is read instead.

    Raises:
        CheckpointError: There is no checkpoint, or none of the iteration in --ckpt-step, or none
            can be read.
    """
    assert options.load is not None
    reader = open_root(
        Path(options.load),
        step=options.ckpt_step,
        verify=False,
        allow_foreign=options.allow_foreign_checkpoints,
    )
    source = options.pretrained_checkpoint
    if reader is None and source not in (None, options.load):
        return network_of(replace(options, load=source))
    if reader is None:
        raise CheckpointError(
            f"--use-checkpoint-args: {_named_flag(options)} {options.load} holds no checkpoint: "
            "give the network's flags instead"
        )
    saved = reader.meta["config"]["model"]
    model = from_dict({"model": saved}, str(reader.path)).model
    network = {f"model.{name}": getattr(model, name) for name in NETWORK_FIELDS if name in saved}
    if saved.get("lora_rank") is None:  # the flags may add adapters
        network = {path: v for path, v in network.items() if path[6:] not in ADAPTER_FIELDS}
    if saved.get("position_embedding_type") == "relative":
        del network["model.max_position_embeddings"]  # relative positions work at any length
    # Also read two flags that are not part of the network's shape but affect its results. The
    # padding of the vocabulary determines the padding entries' share of the softmax, and an import
    # may set the exact GeLU, which is not our default.
    multiple = int(saved.get("make_vocab_size_divisible_by", _PADDING))
    if reader.format == "hf":
        multiple = vocabulary_multiple(int(reader.meta["padded_vocab_size"]))
    network["model.make_vocab_size_divisible_by"] = multiple
    return network | ({"model.onnx_safe": True} if saved.get("onnx_safe") else {})


def with_saved_rounding(config: RunConfig, reader: Reader | None) -> RunConfig:
    """Return the configuration with the checkpoint's --split-rounding, unless one is given.

    Otherwise, a run that continues one of Megatron Core's could read other samples.
    """
    saved = None if reader is None else reader.meta["config"].get("data", {}).get("split_rounding")
    if saved is None or config.data.split_rounding is not None:
        return config
    return with_values(config, {"data.split_rounding": saved})


def progress_at_start(config: RunConfig, reader: Reader | None) -> Progress:
    """Return the counters with which a run begins.

    They are read from the checkpoint that the run continues from, if any. The position in the
    schedules (`scheduled_samples`) is restored later, with the schedules.
    """
    if reader is None or config.checkpoint.finetune:
        return Progress(dropout_seed=config.training.seed)
    return _saved_progress(config, reader)


def _saved_progress(config: RunConfig, reader: Reader) -> Progress:
    progress, meta = Progress(dropout_seed=config.training.seed), reader.meta
    progress.iteration = meta["iteration"]
    progress.consumed_samples = meta["consumed_train_samples"]
    # Without a count of tokens, all samples of the run had the same length.
    length = meta["config"].get("data", {}).get("seq_length") or config.data.seq_length
    tokens = meta.get("consumed_train_tokens", meta["consumed_train_samples"] * length)
    progress.consumed_tokens = int(tokens)
    progress.skipped_samples = meta.get("skipped_train_samples", 0)
    if meta.get("rng") and not config.checkpoint.no_load_rng:
        progress.dropout_seed = meta["rng"]["seed"]
    return progress


def load_shared_weights(run: Run, reader: Reader, *, new: Iterable[str]) -> None:
    """Load the weights that a different network's checkpoint shares with this run.

    Args:
        run: The run, with initial values.
        reader: The checkpoint. Its vocabulary must have as many rows as this run's.
        new: Prefixes of the names of parameters that keep their initial values.

    Raises:
        CheckpointError: A parameter is missing from the checkpoint, or has a different shape.
    """
    new_prefixes = tuple(f"model.{name}" for name in new)
    state = weights_state(run, in_compute_dtype=False)
    shared = {name: entries for name, entries in state.items() if not name.startswith(new_prefixes)}
    restore(reader, shared, cast=True)
    run.optimizer.reload_masters()


def restore_run(run: Run, reader: Reader) -> None:
    """Load weights, optimizer and position from the checkpoint, as the flags specify. Collective.

    Raises:
        CheckpointError: The checkpoint does not fit the run or its flags.
    """
    options, start_time = run.config.checkpoint, time.perf_counter()
    weights_only = options.finetune or options.no_load_optim
    # If only the weights are loaded, they go directly into the fp32 masters of 16-bit weights.
    state = weights_state(run, in_compute_dtype=not weights_only)
    named: dict[str, tuple[Tensor, nn.Parameter]] = {}
    frozen: State = {}
    if not weights_only:
        # Frozen weights have no masters, so their shards (ZeRO stage 3) are loaded directly, too.
        if run.gradients.shares_weights:
            idle = ((name, p) for name, p in run.named_parameters() if not p.requires_grad)
            frozen = shard_state(idle, run.gradients)
            state |= frozen
        if not reader.meta.get("optimizer"):
            raise CheckpointError(
                f"--load {reader.path}: the checkpoint holds no optimizer state: use "
                "--no-load-optim for a fresh optimizer, or --finetune to begin at iteration 0"
            )
        check_states(run.config, reader)
        named = run.optimizer.named_tensors()
        _check_trained(run, reader, named)
        state |= _updated_state(run, reader, named)
    # Report incompatible settings before reading much.
    _check_tokenizer(run, reader)
    new_parts: tuple[str, ...] = ()
    if options.finetune:
        new_parts, state = _without_new(run, reader, state)
    else:
        _restore_position(run, reader)
    # With pipeline parallelism, no rank holds every parameter.
    is_dropped = _SCORE in new_parts
    whole = () if run.layout.pipeline.size > 1 else _REWARD_BODY if is_dropped else ("model.",)
    restore(reader, state, prefixes=whole, cast=weights_only, cast_prefixes=(STATES, *frozen))
    run.optimizer.encode_loaded(named)
    if _ADAPTERS in new_parts:
        initialize_adapters(run.parts)
    if run.config.model.load_adapter is not None:
        new_parts = _load_adapter(run, Path(run.config.model.load_adapter), new_parts, reader)
    if weights_only:
        run.optimizer.reload_masters()
    else:
        _continue_updates(run, reader)
    if run.layout.world.rank == 0:
        seconds = time.perf_counter() - start_time
        initialized = ", ".join(name.removeprefix("model.").rstrip(".") for name in new_parts)
        print_line(
            f"  successfully loaded checkpoint from {reader.path} at iteration {reader.iteration} "
            f"(read in {seconds:.2f} s)"
            + f"; not in the checkpoint, initialized anew: {initialized}" * bool(new_parts)
            + "; the output layer is dropped" * is_dropped
        )
        for line in reader.meta.get("notices", ()):
            print_line(f"  {line}")


def _check_trained(run: Run, reader: Reader, named: Iterable[str]) -> None:
    """Check that the checkpoint holds all optimizer states of the weights that the run trains.

    Collective, because each process may hold states of other weights. There are no states of
    weights that were frozen when the checkpoint was saved. Megatron-LM saves no moments before the
    first update, which is late in fp16: the first loss scales are too high.

    Args:
        run: The run.
        reader: The checkpoint.
        named: The names of the optimizer's `named_tensors`.

    Raises:
        CheckpointError: The checkpoint lacks the optimizer state of a weight.
    """
    saved = set(reader.names())
    local = sorted({name.rpartition(".")[0] for name in named if f"{STATES}{name}" not in saved})
    lacking = sorted(set().union(*JsonExchange(run.layout.world).gather(local)))
    if not lacking:
        return
    model = reader.meta["config"].get("model", {})
    flags = " ".join(("--freeze", *(model.get("freeze") or ())))
    if not model.get("freeze"):
        flags = "--retro-freeze-gpt" if model.get("retro_freeze_gpt") else ""
    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    raise CheckpointError(
        f"--load {reader.path}: the checkpoint lacks optimizer states of weights that this run "
        f"trains: {', '.join(lacking[:SHOWN])}{more}: "
        + (f"give {flags}, as when it was saved, or " if flags else "give ")
        + "--no-load-optim to continue with fresh states (--finetune: from iteration 0)"
    )


def _updated_state(
    run: Run, reader: Reader, named: Mapping[str, tuple[Tensor, nn.Parameter]]
) -> State:
    """Return the tensors that updates change, except the weights.

    Args:
        run: The run.
        reader: The checkpoint.
        named: The optimizer's `named_tensors`.
    """
    state = optimizer_state(run, named=named) | _history_from(run, reader)
    return state | _average_from(run, reader)


def _average_from(run: Run, reader: Reader) -> State:
    """Return the tensors into which to load the averaged weights; empty without an average."""
    average, saved = run.optimizer.average, reader.meta.get("average")
    if average is None:
        return {}
    saved_count = saved["count"] if saved and saved["kind"] == average.kind else 0
    sets = average.prepare(
        lambda prefix: saved_count > 0 and any(name.startswith(prefix) for name in reader.tensors),
        saved_count,
    )
    if not average.count and run.layout.world.rank == 0:
        print_line("  the checkpoint holds no average of this kind: the average starts here")
    return average_state(run, sets)


def _history_from(run: Run, reader: Reader) -> State:
    """Return the tensors into which to load the amax history of delayed fp8 scaling.

    If the lengths of the histories differ, only the newest entries are loaded. If the checkpoint
    lacks the history of some layer, nothing is loaded, and the run's history is cleared, because
    it may come from updates after the checkpoint (`rewind_run`).
    """
    own_state, saved_names = history_state(run), set(reader.names())
    if not saved_names.issuperset(own_state):
        scope = "" if saved_names.isdisjoint(own_state) else " of layers that were in 16 bits"
        if run.layout.replica.rank == run.layout.tensor.rank == 0:  # once per pipeline stage
            print_line(
                f"  the checkpoint holds no fp8 history{scope}: the first iteration uses current "
                "scales"
            )
        for _, entry in flatten(own_state):
            entry.tensor.zero_()
        return {}
    state: State = {}
    for name, entry in flatten(own_state):
        whole = reader.global_shape(name) if name in saved_names else entry.global_shape
        tensor = entry.tensor[..., : whole[-1]]
        state[name] = Entry(tensor, (*entry.global_shape[:-1], whole[-1]), entry.offset)
    return state


def _continue_updates(run: Run, reader: Reader) -> None:
    """Restore the optimizer's counters, fp8 scales and spike limits after loading the tensors."""
    run.optimizer.reload_masters(include_16_bit=False)
    run.optimizer.load_scalars(reader.meta["optimizer"])
    run.amax_history.after_loading()
    if run.spikes is not None and reader.meta.get("spikes"):
        run.spikes.load_state(reader.meta["spikes"])


def rewind_run(run: Run, checkpoint: Reader) -> int:
    """Restore the weights and the optimizer from a checkpoint in the middle of training.

    The averaged weights, the fp8 history and the limits for spikes are restored with them. The
    iterations since then count as skipped: the run continues with the next samples, and its
    schedules continue where they were at the checkpoint. Collective.

    Args:
        run: The run.
        checkpoint: A checkpoint that this run has saved or has continued from.

    Returns:
        The number of samples that have been read since the checkpoint.

    Raises:
        CheckpointError: The checkpoint does not fit the run.
    """
    entries = stored_entries(checkpoint, run.tokenizer.vocab_size)
    reader = PaddedReader(checkpoint, rows=run.plan.embedding.vocabulary, entries=entries)
    run.optimizer.wait_for_weights()
    named = run.optimizer.named_tensors()
    state = weights_state(run, in_compute_dtype=True) | _updated_state(run, reader, named)
    restore(reader, state, cast_prefixes=(STATES,))
    run.optimizer.encode_loaded(named)
    _continue_updates(run, reader)
    run.layers.forget_weights()
    progress, saved = run.progress, _saved_progress(run.config, reader)
    passed = progress.consumed_samples - saved.consumed_samples
    progress.skipped_samples = saved.skipped_samples + passed
    _, progress.scheduled_samples = run.schedules.resumed(reader.meta["schedule"], override=True)
    return passed


def _without_new(run: Run, reader: Reader, state: State) -> tuple[tuple[str, ...], State]:
    """Return the parts of the model that finetuning adds, and the state to load. Collective."""
    new_parts = _lacking_heads(run, reader, state)
    if new_parts and run.config.model.lora_rank is not None:
        lacking = ", ".join(name.removeprefix("model.").rstrip(".") for name in new_parts)
        raise CheckpointError(
            f"--lora-rank {run.config.model.lora_rank}: {reader.path} does not hold {lacking}, "
            "which adapters would leave frozen at its initial values: train all weights first"
        )
    state = {name: entry for name, entry in state.items() if not name.startswith(new_parts)}
    model, saved_names = run.config.model, reader.names()
    optional_parts: dict[str, tuple[bool, Callable[[str], bool]]] = {
        "the layers that read neighbors": (model.retro_add_retriever, is_retriever_parameter),
        _SCORE: (model.reward_head, lambda name: name.startswith(_SCORE)),
        _ADAPTERS: (model.lora_rank is not None, is_adapter_parameter),
    }
    for part, (is_in_model, includes) in optional_parts.items():
        if is_in_model and not any(map(includes, saved_names)):
            new_parts = (*new_parts, part)
            state = {name: entry for name, entry in state.items() if not includes(name)}
    return new_parts, state


def _load_adapter(
    run: Run, folder: Path, new_parts: tuple[str, ...], base: Reader
) -> tuple[str, ...]:
    """Load the adapters, and any reward model's head, from the PEFT files in --load-adapter.

    Args:
        run: The run.
        folder: The folder with the PEFT files.
        new_parts: The parts of the model that the checkpoint lacks.
        base: The checkpoint, with the model that the adapter was trained for.

    Returns:
        The parts of the model that the files also lack.
    """
    # Few runs need these modules.
    from megatron.checkpoint.huggingface.peft import family_in, peft_names
    from megatron.checkpoint.huggingface.peft_reader import PeftReader, tensor_names

    trust, model = run.config.checkpoint.allow_foreign_checkpoints, run.config.model
    vocabulary = run.plan.embedding.vocabulary
    layers, base_meta = adapted_layers(model, vocabulary), base.meta.get("huggingface") or {}
    file_names = tensor_names(folder, allow_foreign=trust)
    family = family_in(file_names, model, layers, vocabulary, base=base_meta.get("family"))
    names = peft_names(model, layers, family, vocabulary)
    files = PeftReader(folder, model, names, allow_foreign=trust)
    reader = PaddedReader(files, rows=vocabulary, entries=run.tokenizer.vocab_size)
    state = weights_state(run, in_compute_dtype=False)
    restore(reader, {name: state[name] for name in state.keys() & reader.names()}, cast=True)
    has_head = any(name.startswith(_SCORE) for name in reader.names())
    if run.layout.world.rank == 0:
        print_line(f"  adapters{' and score' * has_head} loaded from {folder}")
    return tuple(
        name for name in new_parts if name != _ADAPTERS and not (has_head and name == _SCORE)
    )


def _lacking_heads(run: Run, reader: Reader, state: State) -> tuple[str, ...]:
    """Return the prefixes of BERT heads for which the checkpoint holds no tensors. Collective.

    Many Hugging Face folders lack some heads. The call is collective because a head may be on
    another process: with pipeline parallelism only the last stage has heads. A run that trains a
    task has no pretraining heads.
    """
    plan = run.plan
    heads = () if plan.head("masked_token") is None and plan.head("pooler") is None else _HEADS
    heads += () if plan.head("pooler") is None else _ORDER_HEADS
    saved_names = reader.names()
    lacking = [head for head in heads if not any(name.startswith(head) for name in saved_names)]
    if not lacking:
        return ()
    is_local = [any(name.startswith(head) for name in state) for head in lacking]
    local_flags = torch.tensor(is_local, dtype=torch.float32, device=run.device.torch_device)
    counts = all_reduce(local_flags, run.layout.world).tolist()
    return tuple(head for head, count in zip(lacking, counts, strict=True) if count)


def _check_tokenizer(run: Run, reader: Reader) -> None:
    """Refuse a tokenizer that changes what embedding rows mean; with --finetune, only warn."""
    saved, current = reader.meta.get("tokenizer"), run.tokenizer.fingerprint()
    if not saved or saved == current:
        return
    message = (
        f"--load {reader.path}: trained with a different tokenizer (fingerprint {saved}, "
        f"here {current})"
    )
    if not run.config.checkpoint.finetune:
        raise CheckpointError(
            f"{message}: give its vocabulary files, or --finetune to continue with the new one"
        )
    if run.layout.world.rank == 0:
        print_line(
            f"WARNING: {message}: --finetune continues with the run's tokenizer, but the rows of "
            f"its {run.tokenizer.vocab_size:,} entries were learned for different entries"
        )


def _restore_position(run: Run, reader: Reader) -> None:
    """Continue the data, the schedules and the random numbers from the checkpoint."""
    meta = reader.meta
    run.progress = progress_at_start(run.config, reader)
    if run.record is not None and meta.get(RUN) == run.record.run:
        run.useful_seconds, run.was_resumed = meta.get("useful_seconds", 0.0), True
    if not run.config.checkpoint.no_load_optim:  # a fresh optimizer restarts its schedule
        try:
            run.schedules, run.progress.scheduled_samples = resumed_schedules(run, reader)
        except CheckpointError as error:
            raise CheckpointError(f"--load {reader.path}: {error}") from None
    # Without a saved position, validation text is read again from its beginning. That takes longer
    # but ends at the same position, which the iteration determines.
    restore_positions(run.datasets.valid, meta.get("validation_text"))
    has_position = restore_positions(run.datasets.train, meta.get("text"))
    if run.layout.world.rank == 0:
        if not has_position:
            print_line(
                "  the checkpoint does not record a position in this text: the text is read again "
                "from its beginning, up to the next sample"
            )
        for line in (*changed_settings(run.config, reader), *changed_corpus(run.corpus, reader)):
            print_line(line)
