"""Rules for distillation: where logits come from and go to, and what computes them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config.rules_parallel import Exclusions, excluded
from megatron.config.run import RunOptions

_NOT_WITH_TEACHER: Exclusions = {
    "curriculum.curriculum_schedule": ((None,), "logits are those of whole samples"),
}
# Each data-parallel process computes its own files.
_NOT_WITH_SAVING: Exclusions = {
    "parallel.expert_model_parallel_size": ((1,), "processes compute different files"),
}


def distillation(config: RunOptions, world_size: int) -> Iterator[str]:
    """Yield an error for each flag of distillation that contradicts another."""
    asked = config.distillation
    sources = {
        "--teacher-load": asked.teacher_load,
        "--logits-load-dir": asked.logits_load_dir,
        "--logits-save-dir": asked.logits_save_dir,
    }
    given = [f"{flag} {value}" for flag, value in sources.items() if value is not None]
    if not given:
        return
    yield from excluded(config, given[0], _NOT_WITH_TEACHER)
    if asked.logits_load_dir is not None and len(given) > 1:
        others = " and ".join(one for one in given if not one.startswith("--logits-load-dir"))
        yield (
            f"--logits-load-dir {asked.logits_load_dir} cannot be combined with {others}: a run "
            "learns from files, learns from a model, or writes files: drop one of them"
        )
    precision = config.precision
    if precision.cross_entropy_loss_fusion and precision.cross_entropy_fusion_impl == "linear":
        yield (
            f"{given[0]} cannot be combined with --cross-entropy-fusion-impl linear, which never "
            "holds all logits: drop one of them"
        )
    if asked.logits_save_dir is None:
        return
    yield from excluded(config, f"--logits-save-dir {asked.logits_save_dir}", _NOT_WITH_SAVING)
    if asked.logits_save_top_k is None:
        yield (
            f"--logits-save-dir {asked.logits_save_dir} requires --logits-save-top-k: add it "
            "(100 is usual; a number as large as the vocabulary keeps everything)"
        )
    if asked.teacher_load is None and config.checkpoint.load is None:
        yield (
            f"--logits-save-dir {asked.logits_save_dir} requires a teacher: name its checkpoint "
            "with --teacher-load"
        )
