"""The recorded Megatron-LM runs, continued by us."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.parser import parse_config
from megatron.device import Device
from megatron.environment import Launch
from megatron.parallel.layout import Layout
from megatron.training.evaluation import final_evaluation
from megatron.training.loop import train
from megatron.training.setup import build_run
from megatron.training.standard import standard_callbacks
from pretrain_gpt import GPTRecipe
from tests.training.toy import Recorder

GPT = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 4 --global-batch-size 16 --train-iters 40
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 40
    --lr-warmup-fraction 0.1 --attention-dropout 0 --hidden-dropout 0
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce
    --no-persist-layer-norm --no-exit-signal-handler
    --data-path data/gpt_text_document --split 949,50,1
    --tokenizer-type GPT2BPETokenizer --num-workers 0
    --vocab-file data/gpt2-tiny-vocab.json --merge-file data/gpt2-tiny-merges.txt
    --eval-interval 20 --eval-iters 5 --log-interval 1
""".split()


def continue_run(
    layout: Layout, golden: Path, run_name: str, cache: Path, flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Load iteration 20 of a recorded run and train to its end; what was recorded of ours.

    The working folder becomes `golden`: the index cache's descriptions hold the path as spelt.
    """
    os.chdir(golden)
    size, rank = layout.world.size, layout.world.rank
    words = [*GPT, "--load", f"{run_name}/ckpt", "--data-cache-path", str(cache), *flags]
    config = parse_config(words, world_size=size).config
    run = build_run(config, GPTRecipe(), Launch(rank, size), Device.cpu(), layout)
    recorder = Recorder()
    callbacks, listeners = standard_callbacks(run, [recorder])
    train(run, callbacks)
    final_evaluation(run, listeners)
    return recorder.records
