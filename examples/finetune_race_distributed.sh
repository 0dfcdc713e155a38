#!/usr/bin/env bash
# Finetune a pretrained BERT on RACE (questions about a text, four answers each),
# and evaluate it after each epoch.
#
#   TRAIN_DATA='RACE/train/middle RACE/train/high' VALID_DATA='RACE/dev/middle RACE/dev/high' \
#   PRETRAINED=checkpoints/bert_345m VOCAB_FILE=bert-large-uncased-vocab.txt \
#   NPROC_PER_NODE=8 examples/finetune_race_distributed.sh
#
# The data are folders with RACE's *.txt files. Each sample is a question with four texts.
# PRETRAINED is a folder with checkpoints, ours or Megatron-LM's, or a Hugging Face model. A run that
# was interrupted continues when it is started again. Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${TRAIN_DATA:?set it to the training data}"
: "${VALID_DATA:?set it to the validation data}"
PRETRAINED=${PRETRAINED:-${PRETRAINED_CHECKPOINT:-}}
: "${PRETRAINED:?set it to the folder of a pretrained BERT}"
: "${VOCAB_FILE:?set it to its vocabulary (text, one entry per line)}"
OUT=${OUT:-runs/bert-race}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

TRAINING=(
    --epochs 3
    --micro-batch-size 4
    --seq-length 512
    --lr 1.0e-5
    --lr-decay-style linear
    --lr-warmup-fraction 0.06
    --weight-decay 1.0e-1
    --clip-grad 1.0
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}"
    ${PRECISION---fp16} # an empty PRECISION= trains in fp32, which a CPU needs
)

DATA=(
    --train-data $TRAIN_DATA # there may be several, separated by spaces
    --valid-data $VALID_DATA
    --tokenizer-type "${TOKENIZER_TYPE:-BertWordPieceLowerCase}"
    --vocab-file "$VOCAB_FILE"
)

exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" "$ROOT/tasks/main.py" \
    --task RACE --pretrained-checkpoint "$PRETRAINED" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --keep-latest 1 --log-interval 10 \
    "${TRAINING[@]}" "${DATA[@]}" "$@"
