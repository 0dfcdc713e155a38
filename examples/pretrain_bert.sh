#!/usr/bin/env bash
# Pretrain a 345M-parameter BERT in a single process, on the GPU if there is one, otherwise on the CPU.
#
#   DATA_PATH=data/my_text_sentence VOCAB_FILE=bert-vocab.txt \
#   OUT=runs/bert-345m examples/pretrain_bert.sh
#
# Flags given to this script override those below, for example: --train-iters 100 --bf16
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py --split-sentences)}"
: "${VOCAB_FILE:?set it to the WordPiece vocabulary file (text)}"
OUT=${OUT:-runs/bert-345m}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
)

TRAINING=(
    --micro-batch-size 4
    --global-batch-size 8
    --train-iters 2000000
    --lr 0.0001
    --min-lr 0.00001
    --lr-decay-style linear
    --lr-decay-iters 990000
    --lr-warmup-fraction .01
    --weight-decay 1e-2
    --clip-grad 1.0
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB_FILE"
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

exec python "$ROOT/pretrain_bert.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
