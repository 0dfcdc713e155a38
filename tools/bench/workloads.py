"""The workloads, as flags of pretrain_gpt.py, and the corpus on which they train.

Megatron and torchtitan publish numbers for S and L. M6 and M12 are 6 and 12 layers of
Qwen3-30B-A3B with a small vocabulary, O is OLMoE-7B, and D is one dense layer and three
mixture-of-experts layers of DeepSeek-V3, with 32 of its 256 experts and a small vocabulary. The
workloads in `FOR_CPU` are small enough for a CPU: the toy `demo`, the mixture of experts
`small-moe`, and the dense `small`, which does the same work per token as `small-moe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import RunConfig, parse_config

_LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --no-query-key-layer-scaling "
    "--attention-dropout 0 --hidden-dropout 0"
)
_TRAINING = (
    "--lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95 "
    "--clip-grad 1.0 --split 100,0,0 --eval-iters 0"
)
PRECISIONS = {
    "fp32": (),
    "bf16": ("--bf16",),
    "fp8": ("--bf16", "--fp8-format", "hybrid"),
    "fp8-delayed": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
}
FOR_CPU = ("demo", "small", "small-moe")
DOCUMENT_TOKENS = 1000  # mean length of a document in tokens
_CORPUS_SEED = 1234


@dataclass(frozen=True)
class Workload:
    """A model with its batch.

    Attributes:
        network: Flags of the network.
        vocabulary: Size of the vocabulary, including the end-of-document token. It needs no
            padding.
        micro_batch: Samples per forward pass.
        samples_per_gpu: Samples per update per GPU.
        corpus_tokens: Size of the generated corpus in tokens.
    """

    network: str
    vocabulary: int
    micro_batch: int
    samples_per_gpu: int
    corpus_tokens: int


_QWEN3_MIXTURE = (
    "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 "
    "--group-query-attention --num-query-groups 4 --qk-layernorm --num-experts 128 "
    "--moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 1e-3 "
    f"--seq-length 4096 --max-position-embeddings 4096 {_LLAMA}"
)
_SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 "
    f"--max-position-embeddings 256 {_LLAMA}"
)

WORKLOADS = {
    "S": Workload(
        "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 "
        f"--seq-length 4096 --max-position-embeddings 4096 {_LLAMA}",
        vocabulary=131072,
        micro_batch=4,
        samples_per_gpu=4,
        corpus_tokens=16_000_000,
    ),
    "L": Workload(
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --rotary-base 500000 "
        f"--seq-length 8192 --max-position-embeddings 8192 {_LLAMA}",
        vocabulary=128256,
        micro_batch=1,
        samples_per_gpu=4,
        corpus_tokens=16_000_000,
    ),
    "M6": Workload(
        f"--num-layers 6 {_QWEN3_MIXTURE}",
        vocabulary=32768,
        micro_batch=4,
        samples_per_gpu=4,
        corpus_tokens=16_000_000,
    ),
    "M12": Workload(
        f"--num-layers 12 {_QWEN3_MIXTURE}",
        vocabulary=32768,
        micro_batch=4,
        samples_per_gpu=4,
        corpus_tokens=16_000_000,
    ),
    "O": Workload(
        "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 1024 --num-attention-heads 16 "
        "--qk-layernorm --num-experts 64 --moe-router-topk 8 --moe-router-pre-softmax "
        "--moe-aux-loss-coeff 1e-2 "
        f"--seq-length 4096 --max-position-embeddings 4096 {_LLAMA}",
        vocabulary=50304,
        micro_batch=4,
        samples_per_gpu=4,
        corpus_tokens=16_000_000,
    ),
    "D": Workload(
        "--num-layers 4 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --num-experts 32 "
        "--moe-layer-freq [0]+[1]*3 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
        "--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 8 --moe-router-group-topk 4 "
        "--moe-router-topk-scaling-factor 2.5 "
        f"--seq-length 4096 --max-position-embeddings 65536 {_LLAMA}",
        vocabulary=32768,
        micro_batch=1,
        samples_per_gpu=4,
        corpus_tokens=16_000_000,
    ),
    "small-moe": Workload(
        f"{_SMALL} --qk-layernorm --qk-layernorm-scope projection --ffn-hidden-size 128 "
        "--num-experts 64 --moe-router-topk 8 --moe-router-pre-softmax --moe-aux-loss-coeff 1e-2",
        vocabulary=8192,
        micro_batch=2,
        samples_per_gpu=2,
        corpus_tokens=200_000,
    ),
    "small": Workload(
        f"{_SMALL} --qk-layernorm --qk-layernorm-scope projection --ffn-hidden-size 1024",
        vocabulary=8192,
        micro_batch=2,
        samples_per_gpu=2,
        corpus_tokens=200_000,
    ),
    "demo": Workload(
        "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
        f"--seq-length 64 --max-position-embeddings 64 {_LLAMA}",
        vocabulary=1024,
        micro_batch=2,
        samples_per_gpu=2,
        corpus_tokens=200_000,
    ),
}


def training_flags(
    workload: Workload, precision: str, gpus: int, corpus: Path, extra_flags: Sequence[str]
) -> list[str]:
    """Return the flags for pretrain_gpt.py, except those for length and output of the run.

    Args:
        workload: Model and batch to train.
        precision: A key of PRECISIONS.
        gpus: Number of GPUs.
        corpus: Prefix of the corpus.
        extra_flags: Flags to append at the end.
    """
    return [
        *workload.network.split(),
        *f"--micro-batch-size {workload.micro_batch}".split(),
        *f"--global-batch-size {workload.samples_per_gpu * gpus}".split(),
        *_TRAINING.split(),
        *f"--tokenizer-type NullTokenizer --vocab-size {workload.vocabulary - 1}".split(),
        *["--data-path", str(corpus)],
        *PRECISIONS[precision],
        *extra_flags,
    ]


def read_flags(flags: Sequence[str], gpus: int) -> RunConfig:
    """Return the configuration of a run with these flags, for one iteration by default.

    Raises:
        ConfigError: A flag is invalid.
    """
    return parse_config(["--train-iters", "1", *flags], world_size=gpus).config


def tokens_of_step(config: RunConfig) -> int:
    """Return the number of tokens in one update, over all GPUs."""
    return config.training.global_batch_size * config.data.seq_length


def corpus_prefix(
    folder: Path, workload: Workload, *, document_tokens: int = DOCUMENT_TOKENS
) -> Path:
    """Return the prefix of a workload's corpus, generating the corpus if it does not exist.

    Args:
        folder: The folder for corpora.
        workload: The workload, which determines the size of the corpus.
        document_tokens: The mean length of a document in tokens.
    """
    from megatron.data.indexed import idx_path

    name = f"zipf_{workload.vocabulary}_{workload.corpus_tokens}"
    if document_tokens != DOCUMENT_TOKENS:
        name += f"_by_{document_tokens}"
    prefix = folder / name
    if not idx_path(prefix).is_file():
        write_corpus(prefix, workload.vocabulary, workload.corpus_tokens, document_tokens)
    return prefix


def write_corpus(
    prefix: Path, vocabulary: int, tokens: int, document_tokens: int = DOCUMENT_TOKENS
) -> None:
    """Write documents of random ids whose frequencies fall as 1 / rank, like those of words (Zipf).

    The last id ends every document. Ranks are shuffled over ids, so frequent ids are spread over
    the whole embedding table.
    """
    import numpy as np

    from megatron.data.indexed import IndexedDatasetBuilder, best_dtype

    rng = np.random.default_rng(_CORPUS_SEED)
    num_words = vocabulary - 1
    # The logarithm of a Zipf rank is uniform.
    ranks = np.floor(np.exp(rng.random(tokens) * np.log(num_words + 1))).astype(np.int64) - 1
    ids = rng.permutation(num_words)[np.clip(ranks, 0, num_words - 1)]
    count = max(1, tokens // document_tokens)
    ends = np.unique([*rng.integers(1, tokens, count - 1), tokens])
    ids[ends - 1] = num_words
    lengths = np.diff(ends, prepend=0)
    with IndexedDatasetBuilder(prefix, best_dtype(vocabulary)) as builder:
        builder.add_documents(ids, lengths, np.ones(len(lengths), np.int64))
