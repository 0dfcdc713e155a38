"""Train toys twice in the deterministic mode, and print how many different results there were.

test_deterministic_mode.py runs this as a process, because the mode sets variables that CUDA reads
at startup.
"""

import sys

from megatron.config.parser import parse_config
from megatron.processes.launch import read_launch
from megatron.processes.process import processes
from tests.training.toy import TOY, fingerprint, train_toy

# Long enough for attention to use many blocks, whose sums could be added in any order.
LONG = "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 2 --hidden-size 256 "
LONG += "--train-iters 3 --lr 1e-3 --min-lr 1e-4 --deterministic-mode"
SHORT = "--train-iters 3 --deterministic-mode"
CASES = (
    ("gpt", "--bf16"),
    ("gpt", "--fp16 --swiglu --normalization RMSNorm --position-embedding-type rope"),
    ("gpt", "--bf16 --use-flash-attn --group-query-attention --num-query-groups 2"),
    ("gpt", "--bf16 --use-flash-attn --micro-batch-size 1 --attention-dropout 0"),
    ("gpt", "--bf16 --reset-attention-mask --reset-position-ids --eod-mask-loss"),
    ("gpt", "--bf16 --no-masked-softmax-fusion --cross-entropy-fusion-impl linear"),
    ("gpt", "--bf16 --fp8-format hybrid"),
    ("gpt", "--bf16 --fp8-format e4m3 --fp8-recipe delayed"),
    ("gpt", "--bf16 --fp8-format hybrid --num-experts 8 --moe-ffn-hidden-size 32"),
    ("gpt", ""),
    ("bert", "--bf16"),
    ("bert", "--bf16 --attention-dropout 0"),
    ("t5", "--bf16"),
    ("t5", "--bf16 --position-embedding-type relative --geglu"),
)


def main(sizes: str) -> None:
    """Run all cases that the device supports."""
    launch = read_launch()
    config = parse_config([*TOY, *SHORT.split()], world_size=1, architecture="gpt").config
    with processes(config, launch) as (device, layout):
        for kind, flags in CASES:
            if "--use-flash-attn" in flags and not device.is_gpu:
                continue
            words = [*sizes.split(), *flags.split()]
            found = {fingerprint(train_toy(layout, words, kind, device)[1]) for _ in range(2)}
            print(f"results of {kind} {flags}: {len(found)}", flush=True)


if __name__ == "__main__":
    main({"long": LONG, "short": SHORT}[sys.argv[1]])
