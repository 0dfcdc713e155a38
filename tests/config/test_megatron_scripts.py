"""The command lines of Megatron-LM's own example scripts, verbatim."""

from __future__ import annotations

import re

import pytest

from megatron.config.parser import parse_config
from megatron.errors import ConfigError
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
    assert line == "--tokenizer-type GPT2BPETokenizer requires --merge-file: add it"


# From Megatron Core's folders examples/gpt3, bert, t5, llama and mixtral.
_CORE_GPT_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 "
    "--global-batch-size 1536 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 "
    "--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 "
    "--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path d "
    "--vocab-file v --merge-file m --split 949,50,1 --log-interval 100 --save-interval 10000 "
    "--eval-interval 1000 --save c --load c --eval-iters 10 --tensorboard-dir t"
)
_CORE_BERT = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 "
    "--max-position-embeddings 512 --attention-backend auto --micro-batch-size 4 "
    "--global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16 "
    "--lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path d "
    "--vocab-file v --split 949,50,1 --log-interval 100 --save-interval 10000 "
    "--eval-interval 1000 --save c --load c --eval-iters 10 --tensorboard-dir t"
)
_CORE_T5 = (
    "--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 "
    "--kv-channels 64 --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 "
    "--max-position-embeddings 512 --micro-batch-size 64 --global-batch-size 512 --lr 0.0001 "
    "--train-iters 1000000 --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --bf16 --vocab-extra-ids 100 "
    "--init-method-std 0.015 --transformer-impl transformer_engine "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --attention-backend auto "
    "--data-path d --vocab-file v --tokenizer-type BertWordPieceCase --split 99982,9,9 "
    "--log-interval 100 --tensorboard-dir t --save-interval 500 --eval-interval 1000 "
    "--eval-iters 10 --distributed-backend nccl --save c --load c"
)
_CORE_LLAMA3_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 "
    "--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
    "--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p "
    "--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 "
    "--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 "
    "--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 "
    "--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 "
    "--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc "
    "--empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --fp8-format hybrid "
    "--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
    "--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache "
    "--tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader "
    "--no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 "
    "--save-interval 1000 --log-throughput --profile --profile-step-start 4 "
    "--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save c "
    "--load c --tensorboard-dir t"
)
_CORE_MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 "
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 "
    "--no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8 "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather "
    "--overlap-grad-reduce --tokenizer-type Llama2Tokenizer --tokenizer-model t --data-path d "
    "--split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 "
    "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
    "--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel "
    "--log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save c "
    "--load c --tensorboard-dir t --no-load-optim --no-load-rng --wandb-project Mixtral "
    "--wandb-exp-name Mixtral_8x7B"
)


@pytest.mark.parametrize(
    ("words", "kind", "processes", "answers"),
    [
        # As in Megatron itself: the batch size is ramped up in runs that count samples.
        (
            _CORE_GPT_175B + " --rampup-batch-size 16 16 5859375",
            *("gpt", 1024),
            ["--rampup-batch-size"],
        ),
        (_CORE_BERT, "bert", 128, ["--num-layers"]),  # 24 layers do not divide by 16 stages
        (
            _CORE_LLAMA3_8B,
            *("gpt", 8),
            [
                "--fp8-amax-history-len",
                "--fp8-amax-compute-algo",
                "--ckpt-format",
            ],
        ),
    ],
    ids=["gpt3", "bert", "llama"],
)
def test_all_problems_of_a_script_of_core_are_reported_by_name(
    words: str, kind: str, processes: int, answers: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(words.split(), world_size=processes, architecture=kind)
    assert [line.split()[0].rstrip(":") for line in caught.value.problems] == answers


@pytest.mark.parametrize(
    ("words", "kind", "processes", "notes"),
    [
        (_CORE_GPT_175B, "gpt", 1024, []),
        (_CORE_BERT + " --pipeline-model-parallel-size 8", "bert", 128, []),
        (_CORE_T5, "t5", 8, []),
        (
            _CORE_MIXTRAL,
            *("gpt", 32),
            [
                "--no-position-embedding",
                "--moe-grouped-gemm",
                "--moe-token-dispatcher-type",
                "--use-mcore-models",
                "--sequence-parallel",
            ],
        ),
        (
            # Flags that the other messages ask to remove.
            re.sub(
                r"--(ckpt-format|fp8-amax-\S+) \S+",
                "",
                _CORE_LLAMA3_8B,
            ),
            *("gpt", 8),
            [
                "--attention-backend",
                "--grad-reduce-in-bf16",
                "--use-mcore-models",
                "--no-mmap-bin-files",
                "--no-create-attention-mask-in-dataloader",
                "--log-throughput",
                "--sequence-parallel",
                "--calculate-per-token-loss",  # every token has the same weight
                "--tiktoken-pattern",  # belongs to another tokenizer
                "--split",  # needs a corpus
            ],
        ),
    ],
    ids=["gpt3", "bert", "t5", "mixtral", "llama"],
)
def test_a_script_of_core_runs_once_the_messages_are_followed(
    words: str, kind: str, processes: int, notes: list[str]
) -> None:
    run = parse_config(words.split(), world_size=processes, architecture=kind)
    assert [line.split()[0].rstrip(":") for line in run.notices] == notes
