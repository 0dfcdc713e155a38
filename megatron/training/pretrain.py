"""A whole run, from a command line to a trained model. Every `pretrain_*.py` calls `main`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.exchange import JsonExchange
from megatron.checkpoint.find import scan
from megatron.checkpoint.lock import save_lock
from megatron.checkpoint.store import check_space
from megatron.command import print_line, surviving_closed_output
from megatron.config import RunConfig
from megatron.config.parser import Program, parse_config
from megatron.config.yaml_file import dump
from megatron.data.loader import lost_workers
from megatron.device import Device
from megatron.durable import replace_file, writing_to
from megatron.errors import (
    EXIT_OK,
    EXIT_SAVED_ON_SIGNAL,
    CheckpointError,
    CrashLoopError,
    StorageError,
    shortage_errors,
)
from megatron.models.plan import ModelPlan
from megatron.models.plans import model_plan
from megatron.parallel.layout import Layout
from megatron.planner.memory import checkpoint_bytes
from megatron.processes.crashes import CrashLog
from megatron.processes.launch import Launch, end_launcher, notify_saved
from megatron.processes.process import print_notices, processes, run_process
from megatron.tokenizer import padded_vocabulary
from megatron.training.build import build_run
from megatron.training.callbacks.base import Callback
from megatron.training.evaluation import final_evaluation
from megatron.training.loop import standard_callbacks, train
from megatron.training.panel import format_panel, size_rows, start_panel
from megatron.training.recipe import Recipe
from megatron.training.restoring import network_of
from megatron.training.run import Run
from megatron.training.run_record import store_of
from megatron.training.writers import Writer, open_writers

_LESS_MEMORY = (
    "To reduce memory, use a smaller --micro-batch-size, --recompute-activations, "
    "--use-distributed-optimizer, or split the model with --tensor-model-parallel-size or "
    "--pipeline-model-parallel-size; --dry-run estimates the memory per process"
)


class Extras:
    """Steps that a kind of training adds to pretraining.

    Every method is collective except `teacher_plan`, which only rank 0 calls.
    """

    def replace_training(self, config: RunConfig, device: Device, layout: Layout) -> bool:
        """Run another job instead of training if the flags request one; return whether they do.

        This is called before the model or the data is built.

        Args:
            config: The run's configuration.
            device: The device on which this process computes.
            layout: The grid of processes as this process sees it.
        """
        return False

    def teacher_plan(self, config: RunConfig, vocabulary: int) -> ModelPlan | None:
        """Return the plan of the teacher's network, for estimates, or `None` without a teacher.

        Args:
            config: The run's configuration.
            vocabulary: The padded vocabulary size.
        """
        return None

    def begin(self, run: Run) -> None:
        """Run once, after the run is built and its checkpoint is loaded."""

    def callbacks(self, run: Run) -> list[Callback]:
        """Return additional callbacks, which run after the others and after any checkpoint."""
        return []

    def end(self, run: Run) -> None:
        """Run once training is complete, even if there was nothing left to train."""


def main(
    recipe: Recipe,
    argv: Sequence[str] | None = None,
    extras: Extras | None = None,
    choose: Callable[[RunConfig], tuple[Recipe, Extras]] | None = None,
) -> int:
    """Run one process of a pretraining job.

    Args:
        recipe: The recipe, which defines model, data and loss.
        argv: The command line, or `None` for the process's own.
        extras: Additional steps, if any.
        choose: For a program with several kinds of training, a function that returns the recipe and
            the additional steps for a configuration, which replace `recipe` and `extras`. All of
            its recipes have the architecture and the program of `recipe`.

    Returns:
        The exit code: 0 after a complete run, a dry run, or an early exit because of
            --exit-interval, --exit-duration-in-mins or --kill-switch-file; 3 if a signal made the
            run save and exit; 141 if the run saved and exited because its log was closed; otherwise
            the code of the error (`megatron.errors`).

    Raises:
        SystemExit: One of several connected processes failed. The error has been printed.
    """
    started = time.monotonic()
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work(launch: Launch) -> int:
        parsed = parse_config(
            arguments,
            world_size=launch.world_size,
            program=Program(name=recipe.program),
            architecture=recipe.architecture,
            read_checkpoint=network_of,
        )
        print_notices(parsed.notices, launch)
        chosen_recipe, chosen_extras = (recipe, extras) if choose is None else choose(parsed.config)
        if parsed.config.training.dry_run:
            return dry_run(parsed.config, chosen_recipe, launch, chosen_extras)
        return pretrain(parsed.config, chosen_recipe, launch, started, chosen_extras)

    return run_process(arguments, work)


def dry_run(config: RunConfig, recipe: Recipe, launch: Launch, extras: Extras | None = None) -> int:
    """Print the plan of the run, without using a device, process group or corpus.

    Args:
        config: The run's configuration.
        recipe: The recipe, which defines model, data and loss.
        launch: The ranks of this process. Only rank 0 prints.
        extras: Additional steps, if any.

    Returns:
        The exit code.
    """
    if launch.rank:
        return EXIT_OK
    world_size = config.training.dry_run_world_size or launch.world_size
    vocabulary = padded_vocabulary(config)
    teacher = (extras or Extras()).teacher_plan(config, vocabulary)
    plan = replace(model_plan(config.model, vocabulary, recipe.head), teacher=teacher)
    size = config.training.dry_run_memory_gib
    rows = size_rows(config, world_size, plan, memory=None if size is None else size * 2**30)
    print_line(format_panel("Dry run: the configuration is valid", rows))
    return EXIT_OK


def pretrain(
    config: RunConfig,
    recipe: Recipe,
    launch: Launch,
    started: float,
    extras: Extras | None = None,
) -> int:
    """Train according to a resolved configuration. Collective.

    Args:
        config: The run's configuration.
        recipe: The recipe, which defines model, data and loss.
        launch: The ranks of this process, from the launcher.
        started: The `time.monotonic` time at which the process began.
        extras: Additional steps, if any.

    Returns:
        The exit code.
    """
    extras = extras or Extras()
    at_end = ExitStack()  # callbacks to run when the process groups end
    crashes = None if config.checkpoint.save is None else CrashLog(config.checkpoint.save)
    with (
        processes(config, launch, at_end, crashes) as (device, layout),
        shortage_errors(_LESS_MEMORY),
        lost_workers(),
        ExitStack() as stack,
    ):
        if extras.replace_training(config, device, layout):
            return EXIT_OK
        if config.checkpoint.save is not None and crashes is not None:
            folder = Path(config.checkpoint.save)
            with writing_to("--save", folder):
                if layout.world.rank == 0:
                    try:
                        stack.enter_context(save_lock(folder))  # keeps other jobs out
                    except CheckpointError:  # another job is in the folder: its log is not ours
                        crashes.disown()
                        raise
                config = _end_crash_loop(config, crashes, launch, layout)
                if layout.world.rank == 0:
                    replace_file(folder / "config.yaml", dump(config).encode())
            if (store := store_of(config, layout)) is not None:
                stack.enter_context(store.lock())
        # Open writers before the model is built, so that an unwritable path is reported
        # immediately.
        writers = open_writers(config, is_log_rank=layout.world.is_last)
        for writer in writers:
            stack.callback(_close, writer)
        run = build_run(config, recipe, device, layout)
        if config.reliability.fault_inject:
            from megatron.processes.faults import attach_faults  # other runs do not load this code

            attach_faults(layout.journal, run.parts)
        stack.enter_context(surviving_closed_output(run.exit.report_unread_log))
        at_end.callback(run.forward.release)
        _check_space(run)
        _warn_of_newer(run)
        extras.begin(run)
        code = _train_and_evaluate(run, started, extras, writers)
        if code == EXIT_SAVED_ON_SIGNAL:
            notify_saved(launch)
        return code


def _end_crash_loop(
    config: RunConfig, crashes: CrashLog, launch: Launch, layout: Layout
) -> RunConfig:
    """Check whether the run has failed twice in the same iteration, and return the configuration.

    Collective. With --on-crash-loop skip, such iterations are added to --iterations-to-skip.

    Raises:
        CrashLoopError: The last two attempts failed in the same way, and nothing can be skipped.
    """
    options, skips = config.training, config.reliability.on_crash_loop == "skip"

    def decide() -> tuple[str | None, list[int]]:
        if not launch.is_restart:
            crashes.clear()
        loop = crashes.loop()
        if loop is None:
            return None, crashes.skipped
        message = f"iteration {loop.iteration} failed twice in the same way: {loop.reason}"
        if skips and crashes.skip(loop.iteration - 1):
            print_line(
                f"WARNING: {message}. --on-crash-loop skip: its samples are skipped from now on"
            )
            return None, crashes.skipped
        remedy = "fix the cause, and start the run by hand"
        if not skips:
            remedy += ", or skip the samples of that iteration with --on-crash-loop skip"
        return (
            f"{message}: the run is not restarted ({crashes.path} lists the failures): {remedy}",
            [],
        )

    message, skipped = JsonExchange(layout.world).on_main(decide)
    if message is not None:
        end_launcher(launch)
        raise CrashLoopError(message)
    if not (skips and skipped):
        return config
    union = tuple(sorted({*skipped, *(options.iterations_to_skip or ())}))
    return replace(config, training=replace(options, iterations_to_skip=union))


def _close(writer: Writer) -> None:
    """Close a writer. Report a full disk as a warning, because training has already ended."""
    try:
        writer.close()
    except StorageError as error:
        print_line(f"WARNING: {error}")


def _check_space(run: Run) -> None:
    """Check that --save has space for a checkpoint. Collective.

    Raises:
        StorageError: There is no space, so the first save would fail.
    """
    root = run.config.checkpoint.save
    if root is not None and not run.finished:
        size = checkpoint_bytes(run.config, run.plan)
        JsonExchange(run.layout.world).on_main(lambda: check_space(Path(root), size))


def _warn_of_newer(run: Run) -> None:
    """Warn if --save holds checkpoints of iterations after the one at which this run starts.

    This happens, for example, if --load was forgotten.
    """
    root, start = run.config.checkpoint.save, run.progress.iteration
    if root is None or run.layout.world.rank:
        return
    newer = [
        checkpoint.iteration for checkpoint in scan(Path(root))[0] if checkpoint.iteration > start
    ]
    if newer:
        print_line(
            f"WARNING: --save {root} holds checkpoints up to iteration {max(newer)}, and this run "
            f"starts at {start}: they remain until this run replaces them, but --load no longer "
            f"selects them{_how_to_resume(run.config, root)}"
        )


def _how_to_resume(config: RunConfig, root: str) -> str:
    """Return advice on the flags that resume from the newest checkpoint of `root`.

    The text is empty if --load already names `root`, because loading has then reported why the
    newest checkpoint was not used.
    """
    options = config.checkpoint
    loads_root = options.load is not None and Path(options.load).resolve() == Path(root).resolve()
    selecting_flags = {"--finetune": options.finetune, "--ckpt-step": options.ckpt_step}
    without = " and ".join(
        f"without {flag}" for flag, is_given in selecting_flags.items() if is_given
    )
    advice = " ".join(filter(None, ("" if loads_root else f"--load {root}", without)))
    return f". To resume from them: {advice}" if advice else ""


def _train_and_evaluate(run: Run, started: float, extras: Extras, writers: Sequence[Writer]) -> int:
    if run.layout.world.rank == 0:
        print_line(start_panel(run, time.monotonic() - started))
        if run.finished and not run.config.training.skip_train:
            done, requested = run.progress.iteration, run.train_iterations
            print_line(
                f"the checkpoint is at iteration {done} of {requested}: nothing left to train"
            )
    callbacks, scalars = standard_callbacks(run, writers)
    callbacks += extras.callbacks(run)
    early_exit = None if run.config.training.skip_train else train(run, callbacks)
    if early_exit is None:
        final_evaluation(run, scalars)
        extras.end(run)
    elif run.layout.world.rank == 0:
        print_line(f"exiting program at iteration {run.progress.iteration}: {early_exit.reason}")
    if early_exit is None or early_exit.code == EXIT_OK:
        return EXIT_OK
    run.exit.close()
    return early_exit.code
