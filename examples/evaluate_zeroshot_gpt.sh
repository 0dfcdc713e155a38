#!/usr/bin/env bash
# Evaluate a trained GPT without finetuning: on LAMBADA, WikiText-103 or any corpus.
#
#   TASK=LAMBADA VALID_DATA=lambada_test.jsonl CHECKPOINT=checkpoints/gpt2_345m \
#   NPROC_PER_NODE=2 examples/evaluate_zeroshot_gpt.sh
#
# CHECKPOINT is a folder with checkpoints, ours or Megatron-LM's, or a Hugging Face model. The network,
# the window and the tokenizer come from it. If its tokenizer's files have moved, add --vocab-file and
# --merge-file. Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${VALID_DATA:?set it to the file to evaluate on}"
CHECKPOINT=${CHECKPOINT:-${CHECKPOINT_PATH:-}}
: "${CHECKPOINT:?set it to the folder of the model}"
TASK=${TASK:-LAMBADA}

OPTIONS=()
if [ "$TASK" = LAMBADA ]; then
    OPTIONS+=(--strict-lambada)
fi

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-1}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" "$ROOT/tasks/main.py" \
    --task "$TASK" --valid-data "$VALID_DATA" --load "$CHECKPOINT" \
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}" \
    --pipeline-model-parallel-size "${PIPELINE_PARALLEL:-1}" \
    --micro-batch-size 8 --log-interval 10 ${OPTIONS[@]+"${OPTIONS[@]}"} "$@"
