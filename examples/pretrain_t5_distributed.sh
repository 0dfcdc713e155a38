#!/usr/bin/env bash
# Pretrain a 220M-parameter T5 with data parallelism, on one machine or several.
#
#   DATA_PATH=data/my_text_sentence VOCAB_FILE=bert-vocab.txt \
#   NPROC_PER_NODE=8 examples/pretrain_t5_distributed.sh
#
# To use several machines, start it on each of them with NNODES, NODE_RANK (0, 1, ...) and
# MASTER_ADDR (the address of machine 0). Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py --split-sentences)}"
: "${VOCAB_FILE:?set it to the WordPiece vocabulary file (text)}"
OUT=${OUT:-runs/t5-220m}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

MODEL=(
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
)

TRAINING=(
    --micro-batch-size 16
    --global-batch-size 128
    --train-iters 1000000
    --lr 0.0001
    --min-lr 0.00001
    --lr-decay-style linear
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
    ${PRECISION---fp16} # an empty PRECISION= trains in fp32, which a CPU needs
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB_FILE"
    --vocab-extra-ids 100 # one for each masked span of words
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

exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" "$ROOT/pretrain_t5.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
