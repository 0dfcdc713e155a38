"""The recorded Megatron-LM runs, continued by this package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.config.parser import parse_config
from megatron.parallel.layout import Layout
from megatron.training.build import build_run
from megatron.training.evaluation import final_evaluation
from megatron.training.loop import standard_callbacks, train
from megatron.training.recipe import Recipe
from pretrain_bert import BertRecipe
from pretrain_gpt import GPTRecipe
from pretrain_retro import RetroRecipe
from tests.distributed import as_given, toy_device
from tests.training.toy import Recorder

_ALL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 4 --global-batch-size 16 --train-iters 40
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 40
    --lr-warmup-fraction 0.1 --attention-dropout 0 --hidden-dropout 0
    --no-bias-gelu-fusion --no-async-tensor-model-parallel-allreduce --no-exit-signal-handler
    --split 949,50,1 --num-workers 0 --eval-interval 20 --eval-iters 5 --log-interval 1
""".split()
# As recorded. Megatron's fused bias and GeLU is a different function; the other fusions only change
# how the same numbers are computed.
_UNFUSED = """
    --no-masked-softmax-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
    --no-persist-layer-norm
""".split()
GPT = """
    --data-path data/gpt_text_document --tokenizer-type GPT2BPETokenizer
    --vocab-file data/gpt2-tiny-vocab.json --merge-file data/gpt2-tiny-merges.txt
""".split()
BERT = """
    --data-path data/bert_text_sentence --tokenizer-type BertWordPieceLowerCase
    --vocab-file data/bert-5000-vocab.txt
""".split()

# This run was recorded with other sizes.
RETRO = """
    --num-layers 9 --seq-length 256 --max-position-embeddings 256 --init-method-std 0.1
    --split 90,8,2 --eval-iters 2 --data-path 1.0 data/gpt_text_document
    --tokenizer-type GPT2BPETokenizer
    --vocab-file data/gpt2-tiny-vocab.json --merge-file data/gpt2-tiny-merges.txt
    --retro-workdir retro_fp32/workdir --retro-add-retriever --retro-num-neighbors 2
    --retro-num-retrieved-chunks 2 --retro-encoder-layers 2
    --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0
""".split()
RECIPES: dict[str, tuple[Recipe, list[str]]] = {
    "gpt": (GPTRecipe(), GPT),
    "bert": (BertRecipe(), BERT),
    "retro": (RetroRecipe(), RETRO),
}


def continue_run(
    layout: Layout,
    golden: Path,
    run_name: str,
    cache: Path,
    flags: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Load iteration 20 of a recorded run, train to its end and return our records.

    The run's name begins with its kind of network. The working folder becomes `golden`: the index
    cache's descriptions hold the path as written. On a GPU (see `tests.distributed`) it continues
    with all fusions except GeLU's, on a CPU without any.
    """
    os.chdir(golden)
    size, rank = layout.world.size, layout.world.rank
    device = toy_device(rank)
    recipe, corpus = RECIPES[run_name.partition("_")[0]]
    words = [
        *_ALL,
        *(() if device.is_gpu else _UNFUSED),
        *corpus,
        "--load",
        f"{run_name}/ckpt",
        "--data-cache-path",
        str(cache),
        *flags,
    ]
    config = parse_config(words, world_size=size, architecture=recipe.architecture).config
    run = build_run(config, recipe, device, as_given(layout, config))
    recorder = Recorder()
    callbacks, listeners = standard_callbacks(run, [recorder])
    train(run, callbacks)
    final_evaluation(run, listeners)
    return recorder.records
