"""What a flag that nobody knows was probably meant to be."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron.config.fields import nearest
from megatron.config.old_flags import OLD_FLAGS
from megatron.config.refused import REFUSED

# As other programs call it. Megatron's own names, of any age, stand in `refused` and `old_flags`.
OTHER_NAMES: Mapping[str, str] = {
    "--learning-rate": "use --lr",
    "--min-learning-rate": "use --min-lr",
    "--warmup-steps": "use --lr-warmup-iters",
    "--warmup-ratio": "use --lr-warmup-fraction",
    "--lr-scheduler-type": "use --lr-decay-style",
    "--max-grad-norm": "use --clip-grad",
    "--max-steps": "use --train-iters",
    "--num-train-epochs": "use --train-iters or --train-samples",
    "--per-device-train-batch-size": "use --micro-batch-size",
    "--train-batch-size": "use --global-batch-size",
    "--gradient-accumulation-steps": "it follows from --global-batch-size, --micro-batch-size and "
    "the number of processes: use the first",
    "--gradient-checkpointing": "use --recompute-granularity full",
    "--activation-checkpointing": "use --recompute-granularity full",
    "--data-parallel-size": "it follows from the number of processes: drop it",
    "--dropout": "use --hidden-dropout and --attention-dropout",
    "--fsdp": "use --zero-stage 3",
    "--deepspeed": "use --zero-stage",
    "--max-length": "use --seq-length",
    "--max-seq-length": "use --seq-length",
    "--max-seq-len": "use --seq-length",
    "--output-dir": "use --save",
    "--resume-from-checkpoint": "use --load",
    "--save-steps": "use --save-interval",
    "--logging-steps": "use --log-interval",
    "--eval-steps": "use --eval-interval",
}


def explain(name: str, known: Mapping[str, str]) -> tuple[str, str]:
    """One line on an unknown flag, and the known one that was probably meant ("": none).

    Args:
        name: as it was given.
        known: flags that a program knows, to what they set: themselves where they have no field.
    """
    called = OTHER_NAMES.get(name.replace("_", "-"))
    if called is not None:
        first = re.search(r"--[\w-]+", called)
        return f"unknown flag {name}: {called}", first.group() if first else ""
    refused = {flag.name: flag.reason for flag in REFUSED if known.get(flag.name) == flag.name}
    taken = [word for word in known if word not in refused]
    meant = nearest(name, [*taken, *(flag.name for flag in OLD_FLAGS)], refused)
    if meant is None:
        return f"unknown flag {name}: --help lists all flags", ""
    more = f" ({refused[meant]})" if meant in refused else ""
    return f"unknown flag {name}: did you mean {meant}?{more}", meant
