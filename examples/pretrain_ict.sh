#!/usr/bin/env bash
# Pretrain a 217M-parameter bi-encoder for retrieval in a single process, on the GPU if there is one,
# otherwise on the CPU.
#
#   DATA_PATH=data/my_text_sentence TITLES_PATH=data/my_title_sentence VOCAB_FILE=bert-vocab.txt \
#   BERT_CHECKPOINT=runs/bert OUT=runs/ict examples/pretrain_ict.sh
#
# Without BERT_CHECKPOINT, training starts from random weights.
# Flags given to this script override those below, for example: --train-iters 100 --bf16
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py --split-sentences)}"
: "${TITLES_PATH:?set it to the prefix of the titles (tools/preprocess_data.py --json-keys text title)}"
: "${VOCAB_FILE:?set it to the WordPiece vocabulary file (text)}"
OUT=${OUT:-runs/ict}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

MODEL=(
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --seq-length 256
    --max-position-embeddings 512
)

TRAINING=(
    ${BERT_CHECKPOINT:+--bert-load "$BERT_CHECKPOINT"}
    --micro-batch-size 32
    --train-iters 100000
    --lr 0.0001
    --lr-decay-style linear
    --lr-warmup-fraction 0.01
    --weight-decay 1e-2
    --clip-grad 1.0
    --query-in-block-prob 0.1
    --retriever-score-scaling
    --retriever-report-topk-accuracies 1 5 10 20
)

DATA=(
    --data-path "$DATA_PATH"
    --titles-data-path "$TITLES_PATH"
    --tokenizer-type BertWordPieceLowerCase
    --vocab-file "$VOCAB_FILE"
    --split 949,50,1
)

OUTPUT=(
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --save-interval 4000
    --eval-interval 1000
    --eval-iters 10
    --log-interval 100
    --tensorboard-dir "$OUT/tensorboard"
)

exec python "$ROOT/pretrain_ict.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
