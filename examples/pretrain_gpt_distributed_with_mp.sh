#!/usr/bin/env bash
# Pretrain a 345M-parameter GPT with tensor parallelism (each layer split over processes) and pipeline
# parallelism (the layers split into stages), on one machine or several.
#
#   DATA_PATH=data/my_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#   NPROC_PER_NODE=8 examples/pretrain_gpt_distributed_with_mp.sh
#
# To use several machines, start it on each of them with NNODES, NODE_RANK (0, 1, ...) and
# MASTER_ADDR (the address of machine 0). Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${VOCAB_FILE:?set it to the GPT-2 vocabulary file (JSON)}"
: "${MERGE_FILE:?set it to the GPT-2 merges file (text)}"
OUT=${OUT:-runs/gpt-345m}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}
PIPELINE_PARALLEL=${PIPELINE_PARALLEL:-2}

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
)

LAYOUT=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --pipeline-model-parallel-size "$PIPELINE_PARALLEL"
    --sequence-parallel
)

TRAINING=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters 500000
    --lr 0.00015
    --min-lr 1.0e-5
    --lr-decay-style cosine
    --lr-decay-iters 320000
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    ${PRECISION---fp16} # an empty PRECISION= trains in fp32, which a CPU needs
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 949,50,1
)

OUTPUT=(
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
    --log-interval 100
    --tensorboard-dir "$OUT/tensorboard"
)

exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" "$ROOT/pretrain_gpt.py" \
    "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
