#!/usr/bin/env bash
# Finetune a pretrained BERT on MNLI (does one text follow from the other?),
# and evaluate it after each epoch.
#
#   TRAIN_DATA=MNLI/train.tsv VALID_DATA='MNLI/dev_matched.tsv MNLI/dev_mismatched.tsv' \
#   PRETRAINED=checkpoints/bert_345m VOCAB_FILE=bert-large-uncased-vocab.txt \
#   NPROC_PER_NODE=8 examples/finetune_mnli_distributed.sh
#
# The files are those of GLUE. Each validation file, matched and mismatched, is reported separately.
# PRETRAINED is a folder with checkpoints, ours or Megatron-LM's, or a Hugging Face model. A run that
# was interrupted continues when it is started again. Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${TRAIN_DATA:?set it to the training data}"
: "${VALID_DATA:?set it to the validation data}"
PRETRAINED=${PRETRAINED:-${PRETRAINED_CHECKPOINT:-}}
: "${PRETRAINED:?set it to the folder of a pretrained BERT}"
: "${VOCAB_FILE:?set it to its vocabulary (text, one entry per line)}"
OUT=${OUT:-runs/bert-mnli}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

TRAINING=(
    --epochs 5
    --micro-batch-size 8
    --seq-length 512
    --lr 5.0e-5
    --lr-decay-style linear
    --lr-warmup-fraction 0.065
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
    --task MNLI --pretrained-checkpoint "$PRETRAINED" \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" --keep-latest 1 --log-interval 10 \
    "${TRAINING[@]}" "${DATA[@]}" "$@"
