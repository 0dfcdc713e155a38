"""Distillation: learning from the distributions of a teacher."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.fields import Requirement, flag

_TEACHER = Requirement(lambda run: run.distillation.is_on, "--teacher-load or --logits-load-dir")
_ANY = Requirement(
    lambda run: run.distillation.is_on or run.distillation.logits_save_dir,
    "--teacher-load, --logits-load-dir or --logits-save-dir",
)
_SAVES = Requirement(lambda run: run.distillation.logits_save_dir is not None, "--logits-save-dir")
_TOP_P = Requirement(
    lambda run: run.distillation.logits_save_top_p is not None, "--logits-save-top-p"
)
_LOADS = Requirement(lambda run: run.distillation.logits_load_dir is not None, "--logits-load-dir")
_LOADED_AHEAD = "has no effect: --num-workers processes read and decode logits with their samples"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Distillation.

    Attributes:
        teacher_load: Folder of a teacher's checkpoint. The run's model learns from the teacher's
            distribution for every token. The teacher may have different layers and widths, but
            needs the same tokenizer.
        kd_loss_alpha: Weight of the divergence from the teacher in the loss. The cross entropy on
            the data gets the remaining weight, 1 minus this.
        kd_temperature: Divide the logits of teacher and student by this number T before computing
            the divergence, and multiply the divergence by T squared.
        logits_save_dir: Write the teacher's most likely tokens of every training sample to this
            folder, instead of training. The teacher is the model in --teacher-load or, without that
            flag, in --load. Files that are already in the folder are not computed again.
        logits_save_top_k: Tokens to write for each position.
        logits_save_top_p: Stop writing tokens for a position once their total probability reaches
            this.
        logits_save_top_p_min_k: Minimum number of tokens to write for each position, regardless of
            --logits-save-top-p.
        logits_save_dtype: Number format of the log-probabilities that are written.
        logits_load_dir: Learn from the distributions in this folder, written by
            --logits-save-dir.
        logits_load_decode_threads: Accepted for compatibility; no effect.
        logits_load_prefetch_factor: Accepted for compatibility; no effect.
        logits_load_ignore_errors: If the logits of a sample cannot be read, report it and learn
            from the sample's tokens alone.
    """

    teacher_load: str | None = flag(None, only_for=("gpt",))
    kd_loss_alpha: float = flag(
        1.0,
        names="--kd-loss-alpha --logits-load-kd-loss-alpha",
        at_least=0,
        at_most=1,
        needs=_TEACHER,
    )
    kd_temperature: float = flag(1.0, above=0, needs=_ANY)
    logits_save_dir: str | None = flag(None, only_for=("gpt",))
    logits_save_top_k: int | None = flag(None, unit="tokens", at_least=1, needs=_SAVES)
    logits_save_top_p: float | None = flag(None, above=0, at_most=1, needs=_SAVES)
    logits_save_top_p_min_k: int = flag(1, unit="tokens", at_least=1, needs=_TOP_P)
    logits_save_dtype: str = flag("fp16", choices=("fp16", "bf16", "fp32"), needs=_SAVES)
    logits_load_dir: str | None = flag(None, only_for=("gpt",))
    logits_load_decode_threads: int = flag(4, at_least=1, notice=_LOADED_AHEAD)
    logits_load_prefetch_factor: int = flag(3, at_least=1, notice=_LOADED_AHEAD)
    logits_load_ignore_errors: bool = flag(False, needs=_LOADS)

    @property
    def is_on(self) -> bool:
        """Whether the run learns from a teacher."""
        return self.logits_save_dir is None and bool(self.teacher_load or self.logits_load_dir)
