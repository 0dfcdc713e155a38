r"""Find the fastest layouts of a run on a cluster, without a GPU.

    megatron plan --model gpt-125m --gpus 64xH100 --global-batch 1024
    megatron plan --gpus 8xH200 --global-batch 64 -- --num-layers 32 --hidden-size 4096 ...
    megatron plan --gpus 2xH200 --memory --time -- FLAGS   # only predict for the given FLAGS

The planner tries all sensible combinations of tensor, sequence, context, pipeline (chunks,
schedule), expert and data parallelism, ZeRO stage, recomputation and micro-batch size. It predicts
the memory and time of each and prints the fastest layouts that fit, with a breakdown of their
times. docs/planner.md explains the predictions and how close they come to measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.config import yaml_file
from megatron.config.arguments import ToolParser, split
from megatron.config.model import ModelConfig
from megatron.config.other_flags import translate
from megatron.config.parser import Program, parse_config
from megatron.config.resolve import resolve
from megatron.config.run import Findings, RunConfig, RunOptions, field_at, narrow
from megatron.config.stages import chunks_of
from megatron.durable import expect_no_file, plot_name_problems, replace_file, writing_to
from megatron.errors import ConfigError
from megatron.models.arithmetic import count_parameters
from megatron.models.plan import ModelPlan
from megatron.models.plans import model_plan
from megatron.parallel.pipeline.draw import as_text, draw
from megatron.parallel.pipeline.schedule import make_schedule
from megatron.parallel.pipeline.simulate import Timeline, simulate
from megatron.planner.machine import DEFAULT, MACHINES, Machine, find_machine, read_machine
from megatron.planner.prediction import (
    Failures,
    Grid,
    Prediction,
    pipeline_of,
    predict,
    seconds_by_host,
)
from megatron.planner.search import (
    PLANNED,
    Plan,
    Search,
    network_problems,
    to_flags,
    with_teacher,
)
from megatron.recipes import catalog
from megatron.recipes.derive import describe_network, network_flags
from megatron.tokenizer.build import padded_vocab_size

_GIB = 1024.0**3
_VOCABULARY = 50257  # GPT-2's, if nothing else determines the vocabulary
_DRAWN = 4  # micro-batches per stage in a drawing, because more are too dense to read
_MAX_DRAWN_STAGES = 16  # maximum number of stages in a timeline that is printed as text
_HOUR = 3600.0
_MAX_RULES = 3  # rules to show if all layouts are refused
_HOST_BOUND = 0.05  # smallest difference between hosts to report, as a fraction of an update


def build_parser() -> ToolParser:
    """Build the command-line parser."""
    parser = ToolParser("plan", __doc__)
    add = parser.add_argument
    add("--model", metavar="MODEL",
        help="A recipe, a YAML file, or a Hugging Face folder or config.json.")  # fmt: skip
    add("--teacher", metavar="MODEL",
        help="Teacher for distillation, given like --model. Its memory and time are "
        "included.")  # fmt: skip
    add("--gpus", required=True, metavar="NxGPU", help="For example 256xH100.")
    add("--global-batch", type=int, metavar="N", help="Samples per update.")
    add("--memory", nargs="?", type=float, const=math.nan, metavar="GIB",
        help="Memory that a process may use (default: the GPU's). Without a number: predict only "
        "the memory for the given flags.")  # fmt: skip
    add("--time", nargs="?", type=float, const=math.nan, metavar="SECONDS",
        help="Longest acceptable time per update (default: any). Without a number: predict only "
        "the time for the given flags.")  # fmt: skip
    add("--machine", type=Path, metavar="FILE",
        help="File with measured rates: the output of tools/benchmark.py --ceilings, or fields of "
        "Machine as JSON.")  # fmt: skip
    add("--top", type=int, default=10, metavar="N", help="Layouts to print (default: 10).")
    add("--draw", type=Path, metavar="FILE.png", help="Draw the timeline of the fastest layout.")
    add(
        "--output",
        type=Path,
        metavar="FILE.yaml",
        help="Write the run with its fastest layout to this file, for --config.",
    )
    add("--jsonl", type=Path, metavar="FILE.jsonl",
        help="Write the printed layouts with their flags and predictions, one JSON object per "
        "line.")  # fmt: skip
    add("--overwrite", action="store_true", help="Replace existing files.")
    add("--mtbf-hours", type=float, default=50_000, metavar="H",
        help="Mean time between failures of a GPU (default: 50000, as for Llama 3).")  # fmt: skip
    add("--checkpoint-seconds", type=float, default=1.0, metavar="S",
        help="Time that training waits for a checkpoint (default: 1).")  # fmt: skip
    add("--restart-seconds", type=float, default=300.0, metavar="S",
        help="Time from a failure until training continues (default: 300).")  # fmt: skip
    add("words", nargs="*", metavar="-- FLAGS", help="Flags of the training script.")
    return parser


@dataclass(frozen=True)
class PlanRequest:
    """The run and the cluster to plan for.

    Attributes:
        start: The run that `flags` describe.
        flags: The run as flags, without a layout unless only its prediction is requested.
        vocabulary: The number of entries in the vocabulary, without padding.
        gpus: The number of GPUs.
        machine: The machine that the GPUs belong to.
        teacher: The network of --teacher; `None` if there is none.
    """

    start: RunOptions
    flags: list[str]
    vocabulary: int
    gpus: int
    machine: Machine
    teacher: ModelConfig | None

    @property
    def program(self) -> str:
        """The name of the training script."""
        return f"pretrain_{self.start.model.architecture}.py"


def run(options: argparse.Namespace) -> None:
    """Print the fastest layouts, or the prediction for the layout in the flags.

    Raises:
        UserError: The command line or a file has mistakes, or no layout fits.
    """
    check(options)
    request = read_request(options)
    if predicts_only(options):
        plan = predict_configured(request, options.memory is not None, options.time is not None)
        if options.jsonl is not None:
            write_layouts(request, [plan], options.jsonl)
        return
    memory = options.memory * _GIB if options.memory else request.machine.memory
    search = Search(
        request.start,
        request.vocabulary,
        request.gpus,
        request.machine,
        memory,
        options.time or math.inf,
        request.teacher,
    )
    start_time = time.perf_counter()
    plans = search.best(options.top)
    elapsed = time.perf_counter() - start_time
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in search.dropped.items())
    tried_count = search.dropped.total() + len(plans)
    if not plans:
        rules = [text for text, _ in search.problems.most_common(_MAX_RULES)]
        if not tried_count:
            batch = request.start.training.global_batch_size
            raise ConfigError(
                f"--gpus {options.gpus}: neither --global-batch {batch} nor the network's layers "
                f"and heads can be divided over {request.gpus} GPUs: use a multiple of "
                f"{request.gpus} for --global-batch"
            )
        raise ConfigError(
            f"none of {tried_count:,} layouts fits {request.gpus} x {request.machine.name} "
            f"({dropped}): use more GPUs, a --global-batch with more divisors, or a higher "
            "--memory or " + "\n".join(["--time", *(f"refused: {rule}" for rule in rules)])
        )
    best = plans[0]
    network = search.plan_for(best.config.parallel.tensor_model_parallel_size)
    batch, length = best.config.training.global_batch_size, best.config.data.sample_tokens
    print(
        f"{count_parameters(network):,} parameters on {request.gpus:,} x {request.machine.name}, "
        f"{batch:,} samples of {length:,} tokens per update\n"
        f"{tried_count:,} layouts in {elapsed:.1f} s: {dropped}\n"
    )
    print(table(plans, request.gpus))
    print(reasons(plans))
    print(on_other_hosts(request, best, network), end="")
    print(f"\n{command(request, best)}\n")
    print(goodput(request, best, options))
    show_timeline(request, best, network, options)
    if options.output is not None:
        write_settings(request, best, options)
    if options.jsonl is not None:
        write_layouts(request, plans, options.jsonl)


def check(options: argparse.Namespace) -> None:
    """Check the values and files on the command line.

    Raises:
        ConfigError: A value is out of range, a flag does not apply to a prediction alone, --draw
            has an unsupported file name, or an output file already exists.
    """
    problems = [
        f"--{name.replace('_', '-')} {getattr(options, name):g}: must be above 0"
        for name in ("memory", "time", "top", "mtbf_hours", "checkpoint_seconds", "global_batch")
        if getattr(options, name) is not None and getattr(options, name) <= 0
    ]
    if options.restart_seconds < 0:
        problems.append(f"--restart-seconds {options.restart_seconds:g}: must be at least 0")
    problems += [
        f"--{name.replace('_', '-')} {getattr(options, name)}: must be a finite number"
        for name in ("mtbf_hours", "checkpoint_seconds", "restart_seconds")
        if not math.isfinite(getattr(options, name))
    ]
    if options.draw is not None:
        problems += plot_name_problems("--draw", options.draw)
    if problems:
        raise ConfigError(problems)
    if predicts_only(options):
        limits = [
            f"--{name} {getattr(options, name):g}"
            for name in ("memory", "time")
            if getattr(options, name) is not None and not math.isnan(getattr(options, name))
        ]
        ignored = [f"--{name}" for name in ("draw", "output") if getattr(options, name) is not None]
        if limits or ignored:
            raise ConfigError(
                f"{' and '.join(limits + ignored)}: without a number, --memory and --time predict "
                "only the given layout: drop this flag, or give each of them a number"
            )
    for flag in ("draw", "output", "jsonl"):
        path = getattr(options, flag)
        if path is not None:
            expect_no_file(f"--{flag}", [path], overwrite=options.overwrite)


def predicts_only(options: argparse.Namespace) -> bool:
    """Return whether --memory or --time is given without a number, to ask for a prediction."""
    return any(limit is not None and math.isnan(limit) for limit in (options.memory, options.time))


def without_layout(flags: list[str]) -> list[str]:
    """Return the flags without those that the planner chooses."""
    return _without(flags, _layout_names())


def _layout_names() -> set[str]:
    """Return the names of all flags that the planner chooses."""
    return {name for path in PLANNED for name in field_at(path).spellings}


def _without(flags: list[str], names: set[str]) -> list[str]:
    """Return the flags except those with these names."""
    remaining = [flag for flag in split(flags) if flag.name not in names]
    return [
        word for flag in remaining for word in ((flag.name,) * bool(flag.name) + tuple(flag.values))
    ]


def read_request(options: argparse.Namespace) -> PlanRequest:
    """Return the request described by the command line.

    Raises:
        UserError: A model or machine is unknown, or flags have mistakes.
    """
    gpus, machine = _read_cluster(options)
    flags, defined, vocabulary, architecture = _model_flags(options.model, options.words, gpus)
    flags += options.words if predicts_only(options) else without_layout(options.words)
    if options.global_batch is not None:
        flags += ["--global-batch-size", str(options.global_batch)]
    names = {flag.name for flag in translate(split(flags), Findings())}
    given_paths = defined | {path for path in _PATHS if names & set(field_at(path).names)}
    vocabulary_sizes = [field.values for field in split(flags) if field.name == "--vocab-size"]
    if vocabulary_sizes and vocabulary_sizes[-1] and vocabulary_sizes[-1][0].isdigit():
        vocabulary = int(vocabulary_sizes[-1][0]) + 1
    if "training.global_batch_size" not in given_paths:
        raise ConfigError("--global-batch is required: the number of samples per update")
    if not {"data.data_path", "data.mock_data", "data.retro_workdir"} & given_paths:
        flags += ["--mock-data"]
    if not {"tokenizer.tokenizer_model", "tokenizer.vocab_file"} & given_paths:
        flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary - 1)]
        if "tokenizer.vocab_extra_ids" in given_paths:  # a recipe counts them in its vocabulary
            flags += ["--vocab-extra-ids", "0"]
    if not {"training.train_iters", "training.train_samples"} & given_paths:
        flags += ["--train-iters", "100"]
    if "schedule.lr" not in given_paths:
        flags += ["--lr", "1e-4"]
    if "training.micro_batch_size" not in given_paths:
        flags += ["--micro-batch-size", "1"]
    program = Program(name=f"pretrain_{architecture}.py", rules=())
    start = parse_config(flags, world_size=gpus, architecture=architecture, program=program).config
    if problems := network_problems(start):
        raise ConfigError(problems)
    fp8, name = start.precision.fp8_format, machine.name
    if fp8 is not None and machine.products_fp8 is None:
        raise ConfigError(f"--fp8-format: {name} does not support FP8: drop it")
    if fp8 is not None and start.model.num_experts and not machine.experts_in_fp8:
        raise ConfigError(
            f"--fp8-format with --num-experts: {name} does not support FP8 for experts: drop "
            "--fp8-format"
        )
    teacher = _read_teacher(options, start)
    return PlanRequest(start, flags, vocabulary, gpus, machine, teacher)


def _read_teacher(options: argparse.Namespace, start: RunOptions) -> ModelConfig | None:
    """Return the network of --teacher, or `None` without a teacher.

    Raises:
        UserError: The model is unknown or not a GPT, or --teacher-load is given without --teacher.
    """
    folder = start.distillation.teacher_load
    if options.teacher is None:
        if folder is None:
            return None
        raise ConfigError(
            f"--teacher-load {folder}: the planner does not read checkpoints: name the teacher's "
            "network with --teacher MODEL (a recipe, a YAML file, or a Hugging Face folder)"
        )
    teacher_options = {**vars(options), "model": options.teacher, "teacher": None, "words": []}
    request = read_request(
        argparse.Namespace(**{**teacher_options, "global_batch": options.global_batch or 1})
    )
    model = narrow(resolve(request.start, request.gpus), RunConfig).model
    if model.architecture != "gpt":
        raise ConfigError(f"--teacher {options.teacher}: the teacher must be a GPT")
    return model


def _read_cluster(options: argparse.Namespace) -> tuple[int, Machine]:
    """Return the number of GPUs and their machine.

    Raises:
        UserError: The number, the GPU type or the file for --machine is wrong.
    """
    match = re.fullmatch(r"(\d+)(?:x(\w+))?", options.gpus)
    if match is None or int(match[1]) < 1:
        raise ConfigError(f"--gpus {options.gpus}: give a number and a GPU type, such as 256xH100")
    if match[2] is None and options.machine is None:
        known_types = ", ".join(MACHINES)
        raise ConfigError(
            f"--gpus {options.gpus}: add the type, such as {match[1]}xH100 ({known_types})"
        )
    machine = find_machine(match[2]) if match[2] else DEFAULT
    if options.machine is not None:
        machine = read_machine(options.machine, machine)
    gpus = int(match[1])
    if gpus > machine.node and gpus % machine.node:
        raise ConfigError(
            f"--gpus {options.gpus}: does not fill nodes of {machine.node} GPUs: use "
            f"{gpus - gpus % machine.node} or {gpus - gpus % machine.node + machine.node} GPUs, or "
            'set another "node" in a --machine FILE'
        )
    return gpus, machine


_PATHS = (
    *("training.global_batch_size", "training.train_iters", "training.train_samples"),
    *("training.micro_batch_size", "schedule.lr", "data.data_path", "data.mock_data"),
    *("data.retro_workdir", "tokenizer.tokenizer_model", "tokenizer.vocab_file"),
)


def _model_flags(
    model: str | None, flags: list[str], gpus: int
) -> tuple[list[str], set[str], int, str]:
    """Return a model's flags, the names of the values they set, its vocabulary and architecture.

    Without a model, --config or the other `flags` determine the architecture.

    Raises:
        UserError: The model is unknown, a file is invalid, or there are a model and --config.
    """
    files = [flag.values[0] for flag in split(flags) if flag.name == "--config" and flag.values]
    if model is None and not files:
        return [], set(), _VOCABULARY, catalog.architecture_of(split(flags))
    if model is not None and files:
        raise ConfigError(
            f"--model {model} and --config {files[-1]}: both name a run: give one of them"
        )
    if model is None or not catalog.is_huggingface(Path(model)):
        recipe = catalog.read(Path(files[-1])) if model is None else catalog.find(model)
        from_vocab_size = int(recipe.values.get("tokenizer.vocab_size") or _VOCABULARY - 1) + 1
        vocabulary = int(recipe.facts.get("vocabulary", from_vocab_size))
        words = [] if model is None else ["--config", str(recipe.path)]
        defined = yaml_file.read(recipe.path, Findings(), gpus)
        default = catalog.architecture_of(split(flags))
        architecture = str(defined.get("model.architecture", default))
        return words, set(defined), vocabulary, architecture
    network = describe_network(Path(model))
    network_words = network_flags(network.model)
    length = min(network.model.max_position_embeddings, 8192)
    network_words += ["--seq-length", str(length), "--bf16"]
    return network_words, set(), network.vocab, network.model.architecture


def predict_configured(request: PlanRequest, memory: bool, seconds: bool) -> Plan:
    """Print the predicted memory, time or both for the given flags, and return the prediction.

    Raises:
        ConfigError: The flags are wrong for this number of GPUs.
    """
    flags, kind = request.flags, request.start.model.architecture
    config = parse_config(flags, world_size=request.gpus, architecture=kind).config
    tensor = config.parallel.tensor_model_parallel_size
    divisor = config.model.make_vocab_size_divisible_by
    network = model_plan(config.model, padded_vocab_size(request.vocabulary, divisor, tensor))
    network = with_teacher(network, request.teacher)
    prediction = predict(config, network, request.gpus, request.machine)
    print(describe(config, request.gpus))
    if memory:
        print(f"memory per process: {prediction.memory.describe()}")
    if seconds:
        print(
            f"time per update: {prediction.seconds:.4g} s, {prediction.tokens_per_second:,.0f} "
            f"tokens/s per GPU, {prediction.mfu:.1%} MFU\n{shares(prediction)}"
        )
        print(on_other_hosts(request, Plan({}, config, prediction), network), end="")
    return Plan({}, config, prediction)


def describe(config: RunConfig, gpus: int) -> str:
    """Describe a layout, for example "TP 2, PP 4 x 2, DP 8, ZeRO 1, micro-batch 1"."""
    parallel, training, grid = config.parallel, config.training, Grid.of(config, gpus)
    settings = [f"TP {grid.tensor}"] if grid.tensor > 1 else []
    settings += [f"CP {grid.context} {parallel.cp_comm_type}"] if grid.context > 1 else []
    if grid.pipeline > 1:
        text = parallel.pipeline_model_parallel_layout
        chunks = chunks_of(config.model.num_layers, parallel)
        kind = " zero-bubble" if parallel.pipeline_schedule == "zero-bubble" else ""
        settings.append(f"PP {grid.pipeline}" + (f" x {chunks}" if chunks > 1 else "") + kind)
        settings += ["uneven"] if text is not None else []
    if grid.expert > 1:
        settings.append(f"EP {grid.expert}")
    if config.model.num_experts and grid.expert_tensor > 1:
        settings.append(f"ETP {grid.expert_tensor}")
    settings.append(f"DP {grid.data}")
    settings += [f"ZeRO {parallel.zero_stage}"] if parallel.zero_stage else []
    settings.append(f"micro-batch {training.micro_batch_size}")
    if training.recompute_granularity is not None:
        settings.append(f"{training.recompute_granularity} recomputation")
    return ", ".join(settings)


def shares(prediction: Prediction) -> str:
    """Return the shares of an update's time above 0.05% by activity, largest first."""
    parts = sorted(prediction.parts.items(), key=lambda part: -part[1])
    return ", ".join(
        f"{name} {time / prediction.seconds:.1%}"
        for name, time in parts
        if time > 0.0005 * prediction.seconds
    )


def table(plans: list[Plan], gpus: int) -> str:
    """Return the layouts as a table with the shares of their time by activity."""
    names = list(plans[0].prediction.parts)
    rows = [("", "layout", "GiB", "s/update", "tokens/s/GPU", "MFU", *names)]
    for rank, plan in enumerate(plans, 1):
        prediction = plan.prediction
        time_shares = [
            f"{100 * prediction.parts[name] / prediction.seconds:.1f}%" for name in names
        ]
        rows.append(
            (
                str(rank),
                describe(plan.config, gpus),
                f"{prediction.memory.total / _GIB:.1f}",
                f"{prediction.seconds:.4g}",
                f"{prediction.tokens_per_second:,.0f}",
                f"{prediction.mfu:.1%}",
                *time_shares,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column_index == 1 else cell.rjust(width)
            for column_index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def reasons(plans: list[Plan]) -> str:
    """Return why the first layout is the fastest, and why the others are slower."""
    best = plans[0].prediction
    lines = [f"\n1 is the fastest. Its time: {shares(best)}."]
    for rank, plan in enumerate(plans[1:], 2):
        prediction = plan.prediction
        differences = {
            name: (prediction.parts[name] - best.parts[name]) / best.seconds for name in best.parts
        }
        largest_differences = sorted(differences.items(), key=lambda part: -abs(part[1]))[:2]
        explanation = ", ".join(
            f"{name} {share:+.1%}" for name, share in largest_differences if abs(share) > 0.0005
        )
        slower = prediction.seconds / best.seconds - 1
        lines.append(
            f"{rank} takes {slower:.1%} more" + (f": {explanation}" if explanation else "")
        )
    return "\n".join(lines)


def on_other_hosts(request: PlanRequest, plan: Plan, network: ModelPlan) -> str:
    """Return a line about the host's effect on the time of an update, or "" if it is small."""
    low, high = seconds_by_host(plan.config, network, request.gpus, request.machine)
    if high - low < _HOST_BOUND * plan.prediction.seconds:
        return ""
    return (
        f"The GPUs wait for the host to launch kernels: {low:.4g} s on the fastest host that was "
        f"measured, {high:.4g} s on the slowest. Try --cuda-graph-impl local (which excludes some "
        'layouts), larger micro-batches, or fewer GPUs, or set "launch" in a --machine FILE.\n'
    )


def command(request: PlanRequest, plan: Plan) -> str:
    """Return the command line that trains with a layout."""
    gpus, node = request.gpus, request.machine.node
    nodes, per_node = max(1, gpus // node), min(gpus, node)
    launcher = f"torchrun --nproc-per-node {per_node}"
    if nodes > 1:
        launcher = (
            f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-endpoint HOST:29400"
        )
    return f"{launcher} {request.program} {shlex.join(_training_flags(request, plan))}"


def _training_flags(request: PlanRequest, plan: Plan) -> list[str]:
    """Return the flags of the training script for a layout."""
    layout_flags = to_flags(plan.values, request.start)
    return [*_without(request.flags, {flag.name for flag in split(layout_flags)}), *layout_flags]


def goodput(request: PlanRequest, plan: Plan, options: argparse.Namespace) -> str:
    """Return a line with the best checkpoint interval and the expected goodput."""
    mean_interval = options.mtbf_hours * _HOUR / request.gpus
    failures = Failures(mean_interval, options.checkpoint_seconds, options.restart_seconds)
    interval = failures.best
    updates = max(1, round(interval / plan.prediction.seconds))
    fraction = failures.goodput(updates * plan.prediction.seconds)
    return (
        f"failures: one every {mean_interval / _HOUR:.3g} h on average. Save every {updates:,} "
        f"updates ({updates * plan.prediction.seconds / 60:.3g} min; Young "
        f"{failures.young / 60:.3g}, Daly {failures.daly / 60:.3g}): goodput {fraction:.2%}"
    )


def show_timeline(
    request: PlanRequest, plan: Plan, network: ModelPlan, options: argparse.Namespace
) -> None:
    """Print the timeline of a layout, and draw it if requested.

    No timeline is printed without a pipeline or for more than `_MAX_DRAWN_STAGES` stages.

    Raises:
        StorageError: The drawing cannot be written.
    """
    pipeline, counts, costs = pipeline_of(plan.config, network, request.gpus, request.machine)
    micro_batches = min(pipeline.micro_batches, _DRAWN * pipeline.stages)
    schedule = make_schedule(pipeline.kind, pipeline.stages, pipeline.chunks, micro_batches)
    timeline: Timeline = simulate(schedule, pipeline.times(counts, costs))
    title = f"{pipeline.kind}, the first {micro_batches} of {pipeline.micro_batches} micro-batches"
    if 1 < pipeline.stages <= _MAX_DRAWN_STAGES:
        print(f"\n{title}\n{as_text(timeline)}")
    if options.draw is not None:
        draw(timeline, f"{title} (s)", pipeline.chunks, options.draw)
        print(f"wrote {options.draw}")


def write_settings(request: PlanRequest, plan: Plan, options: argparse.Namespace) -> None:
    """Write the run's complete configuration, with the layout, as YAML for --config.

    Raises:
        StorageError: The file cannot be written.
    """
    text = f"# {command(request, plan)}\n{yaml_file.dump(plan.config)}"
    with writing_to("--output", options.output):
        options.output.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.output, text.encode())
    print(f"wrote {options.output}")


def write_layouts(request: PlanRequest, plans: list[Plan], path: Path) -> None:
    """Write layouts as JSON Lines, the input of tools/benchmark_layouts.py --plan.

    Raises:
        StorageError: The file cannot be written.
    """
    lines = [json.dumps(as_record(request, plan)) + "\n" for plan in plans]
    with writing_to("--jsonl", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, "".join(lines).encode())
    print(f"wrote {path}")


def as_record(request: PlanRequest, plan: Plan) -> dict[str, object]:
    """Return a layout with its flags and predictions, as a record for --jsonl.

    `flags` and `layout_flags` together are the command line of `script`.
    """
    flags, prediction = _training_flags(request, plan), plan.prediction
    other_names = {flag.name for flag in split(flags)} - _layout_names()
    return {
        "layout": describe(plan.config, request.gpus),
        "gpus": request.gpus,
        "machine": request.machine.name,
        "script": request.program,
        "flags": shlex.join(without_layout(flags)),
        "layout_flags": shlex.join(_without(flags, other_names)),
        "seconds": prediction.seconds,
        "gib": prediction.memory.total / _GIB,
        "parts": prediction.parts,
    }
