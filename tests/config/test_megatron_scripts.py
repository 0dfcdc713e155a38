"""The command lines of Megatron-LM's own example scripts, as they stand there."""

from __future__ import annotations

import pytest

from megatron.config.parser import parse_config
from tests.config.command import parse, problems

_GPT_345M = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 "
    "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --data-path a_document "
    "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save c "
    "--load c --distributed-backend nccl"
)
_GPT_175B = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 "
    "--hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 "
    "--rampup-batch-size 16 16 5859375 --train-samples 146484375 --lr-decay-samples 126953125 "
    "--lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine "
    "--log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path 0.2 a 0.3 b 0.5 c "
    "--vocab-file gpt-vocab.json --merge-file gpt-merges.txt --save-interval 1000 --save c "
    "--load c --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --tensorboard-dir t --fp16 "
    "--activations-checkpoint-method uniform"
)
_BERT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 "
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 0.0001 --train-iters 1000000 "
    "--lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 --weight-decay 1e-2 "
    "--lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --data-path a_sentence --vocab-file v.txt "
    "--data-impl mmap --split 949,50,1 --log-interval 100 --save-interval 10000 "
    "--eval-interval 1000 --eval-iters 10 --distributed-backend nccl --save c --load c"
)
_T5 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 "
    "--ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 "
    "--max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 16 --lr 0.0001 "
    "--train-iters 1000000 --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --vocab-extra-ids 100 "
    "--data-path a_sentence --vocab-file v.txt --data-impl mmap --split 949,50,1 "
    "--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save c "
    "--load c"
)


@pytest.mark.parametrize(
    ("words", "kind", "processes", "tokenizer", "notices"),
    [
        (_GPT_345M, "gpt", 1, "GPT2BPETokenizer", 0),
        (_GPT_345M + " --checkpoint-activations", "gpt", 1, "GPT2BPETokenizer", 1),
        (_GPT_175B, "gpt", 1024, "GPT2BPETokenizer", 1),
        (_BERT, "bert", 8, "BertWordPieceLowerCase", 0),
        (_T5, "t5", 1, "BertWordPieceLowerCase", 0),
    ],
    ids=["gpt", "gpt of 2021", "gpt 175B", "bert", "t5"],
)
def test_scripts_run_as_they_are(
    words: str, kind: str, processes: int, tokenizer: str, notices: int
) -> None:
    run = parse_config(words.split(), world_size=processes, architecture=kind)
    assert run.config.tokenizer.tokenizer_type == tokenizer
    assert len(run.notices) == notices


def test_a_kind_that_is_named_wins_and_without_files_none_is_taken() -> None:
    run = parse("--vocab-file v --tokenizer-type BertWordPieceCase", without=["--vocab-size"])
    assert run.config.tokenizer.tokenizer_type == "BertWordPieceCase"
    (line,) = problems(without=["--tokenizer-type", "--vocab-size"])
    assert line.startswith("--tokenizer-type is required")
    (line,) = problems("--vocab-file v", without=["--tokenizer-type", "--vocab-size"])
    assert line == "--tokenizer-type GPT2BPETokenizer needs --merge-file: give it"
