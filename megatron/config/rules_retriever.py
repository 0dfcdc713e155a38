"""Rules for bi-encoders (pretrain_ict.py)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.resolve import data_parallel_size
from megatron.config.run import RunOptions


def towers(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each setting that cannot be combined with a bi-encoder."""
    if config.model.architecture != "ict":
        return
    ranks = data_parallel_size(config, world_size)
    evaluated = config.evaluation.eval_micro_batch_size if config.evaluation.eval_iters else None
    for flag, samples in (
        ("--micro-batch-size", config.training.micro_batch_size),
        ("--eval-micro-batch-size", evaluated),
    ):
        if not samples == ranks == 1:
            continue
        yield (
            f"{flag} 1 with one data-parallel process: a query is compared with the "
            "contexts of the other samples, and there are none: use at least 2"
        )
    stages = config.parallel.pipeline_model_parallel_size
    if stages > 1:
        yield (
            f"--pipeline-model-parallel-size {stages}: the towers of a bi-encoder cannot be split "
            "into stages: use --tensor-model-parallel-size instead"
        )
    if config.training.cuda_graph_impl == "local":
        yield (
            f"--cuda-graph-impl {config.training.cuda_graph_impl}: the loss of a bi-encoder "
            "compares the texts of all processes, and such an exchange is not recorded: drop the "
            "flag"
        )
    if config.checkpoint.ckpt_format == "legacy":
        yield (
            "--ckpt-format legacy: Megatron-LM's bi-encoders can be read but not written: use "
            "--ckpt-format native"
        )


def titles(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error unless a bi-encoder trains on a single dataset that has titles."""
    data = config.data
    if config.model.architecture != "ict" or data.mock_data:
        return
    split_paths = {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    if given := [name for name, paths in split_paths.items() if paths]:
        yield (
            f"{', '.join(given)}: --titles-data-path names the titles of one dataset: give "
            "--data-path, and divide it with --split"
        )
    elif data.data_path is not None and len(data.data_path) > 1:
        yield (
            f"--data-path names {len(data.data_path)} values: a bi-encoder trains on one dataset: "
            "join several, and their titles in the same order, with tools/merge_datasets.py"
        )
    if config.retriever.titles_data_path is None:
        yield (
            "--titles-data-path is required: preprocess with --json-keys text title "
            "--split-sentences, and give the prefix of the titles"
        )
