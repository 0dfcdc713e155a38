"""Checks of saving and loading: each mistake with the line that the user sees."""

from __future__ import annotations

import pytest

from tests.config.command import problems

_LINES = [
    (
        "--save here",
        "--save here needs --save-interval: give iterations between checkpoints, or minutes as "
        "--save-interval-in-mins",
    ),
    (
        "--save /runs/\udce9 --save-interval 5",
        r"--save '/runs/\udce9': the path '/runs/\udce9' is not UTF-8: rename it",
    ),
    (
        "--tensorboard-dir /l/\udce9",
        r"--tensorboard-dir '/l/\udce9': the path '/l/\udce9' is not UTF-8: rename it",
    ),
    (
        "--data-cache-path /c/\udce9",
        r"--data-cache-path '/c/\udce9': the path '/c/\udce9' is not UTF-8: rename it",
    ),
    (
        "--save here --save-interval-in-mins 0",
        "--save-interval-in-mins 0.0: must be above 0",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --optimizer sgd "
        "--use-distributed-optimizer",
        "--ckpt-format legacy with --use-distributed-optimizer: Megatron-LM's file stores Adam's "
        "states, not those of --optimizer sgd: drop one of the three flags",
    ),
    *(
        (
            f"--save here --save-interval 5 --ckpt-format {kind} --optimizer muon",
            f"--ckpt-format {kind} with --optimizer muon: its states cannot be written in "
            "Megatron-LM's formats: use --ckpt-format native, or --no-save-optim",
        )
        for kind in ("legacy", "torch_dist")
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --position-embedding-type yarn",
        "--rope-type yarn: Megatron-LM 23.08, the target of --ckpt-format legacy, does not "
        "support this network: use --ckpt-format native",
    ),
    *(
        (
            f"--save here --save-interval 5 --ckpt-format torch_dist {flags}",
            f"--ckpt-format torch_dist with --rope-type yarn with {other}: Megatron Core does not "
            "support it: use --ckpt-format native",
        )
        for flags, other in (
            ("--position-embedding-type yarn --mtp-num-layers 1", "--mtp-num-layers 1"),
            (
                "--position-embedding-type rope --rope-type yarn "
                "--yarn-original-max-position-embeddings 8 --rotary-percent 0.5",
                "--rotary-percent 0.5",
            ),
        )
    ),
    (
        "--save here --save-interval 5 --ckpt-format torch_dist --freeze embedding layers.0",
        "--ckpt-format torch_dist with --freeze layers.0: Megatron Core stores the optimizer "
        "states of all layers in one tensor: freeze the same weights in every layer, use "
        "--ckpt-format native, or add --no-save-optim",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --use-distributed-optimizer "
        "--freeze embedding",
        "--ckpt-format legacy with --use-distributed-optimizer and --freeze embedding: "
        "Megatron-LM's file stores the optimizer states of all weights: drop one of the three, use "
        "--ckpt-format native, or add --no-save-optim",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --qk-layernorm",
        "--qk-layernorm: Megatron-LM 23.08, the target of --ckpt-format legacy, does not support "
        "such weights: use --ckpt-format native",
    ),
    (
        "--save here --save-interval 5 --ckpt-format legacy --num-layers 4 "
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
        "--ckpt-format legacy: Megatron-LM 23.08 gives every stage the same number of layers, but "
        "here they have 1, 3: use --ckpt-format native",
    ),
    ("--save here --save-interval 5 --keep-latest 0", "--keep-latest 0: must be at least 1"),
    (
        "--exit-on-missing-checkpoint",
        "--exit-on-missing-checkpoint requires --load: add it, or drop the flag",
    ),
    (
        "--save here --save-interval 5 --save-retain-interval 0",
        "--save-retain-interval 0: must be at least 1",
    ),
    (
        "--save here --save-interval 5 --save-retain-interval 12",
        "--save-retain-interval 12 is not divisible by --save-interval 5: use 10 or 15",
    ),
    (
        "--save here --save-interval 5 --save-retain-interval 2",
        "--save-retain-interval 2 is not divisible by --save-interval 5: use 5",
    ),
    (
        "--save here --save-interval-in-mins 5 --save-retain-interval 2",
        "--save-retain-interval 2 requires --save-interval: use a divisor of 2",
    ),
    ("--ckpt-step 5", "--ckpt-step 5 requires --load: add it, or drop the flag"),
    ("--load here --ckpt-step -1", "--ckpt-step -1: must be at least 0"),
    (
        "--no-initialization",
        "--no-initialization requires --load: add it, or drop the flag",
    ),
    (
        "--use-checkpoint-args",
        "--use-checkpoint-args requires --load: add it, or drop the flag",
    ),
]


@pytest.mark.parametrize(("words", "line"), _LINES, ids=[words for words, _ in _LINES])
def test_a_mistake_and_its_line(words: str, line: str) -> None:
    lines = problems(words, world_size=8)
    assert line in lines
    assert len(lines) == 1 or "pipeline-model-parallel-size" in words  # which has rules of its own
