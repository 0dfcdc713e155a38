#!/usr/bin/env bash
# Pretrain a network with the shape of Llama 2 7B on one machine with data parallelism. Each GPU holds
# the whole model and its optimizer (about 121 GB), so GPUs with 141 GB, such as the H200, are needed.
#
#   DATA_PATH=data/my_text_document TOKENIZER_MODEL=tokenizer.model examples/pretrain_llama2_7b.sh
#
# `examples/pretrain_llama2_7b.sh --dry-run` prints what a run would need, without using a GPU.
# Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${TOKENIZER_MODEL:?set it to the SentencePiece model of Llama 2 (tokenizer.model)}"
OUT=${OUT:-runs/llama2-7b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

MODEL=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --no-query-key-layer-scaling
    --attention-dropout 0
    --hidden-dropout 0
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 250000
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    ${PRECISION---bf16} # an empty PRECISION= trains in fp32
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --split 98,2,0
)

OUTPUT=(
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 1000
    --eval-interval 1000
    --eval-iters 10
    --log-interval 1
    --tensorboard-dir "$OUT/tensorboard"
)

exec python "$ROOT/tools/torchrun.py" --standalone --nproc-per-node "${NPROC_PER_NODE:-8}" \
    "$ROOT/pretrain_gpt.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
