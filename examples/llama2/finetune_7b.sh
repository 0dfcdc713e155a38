#!/usr/bin/env bash
# Continue pretraining, or finetune, Llama 2 7B on one machine of 8 GPUs.
#
#   CHECKPOINT=checkpoints/llama2-7b DATA_PATH=data/my_text_document \
#       examples/llama2/finetune_7b.sh
#
# CHECKPOINT is the result of importing Meta's weights with tools/checkpoint/util.py
# (docs/llama2.md). The network and the tokenizer come from it. A second run continues from the last
# checkpoint. With --dry-run it prints what a run would need, and needs no GPU. Flags given to this
# script come last and win.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${CHECKPOINT:?set it to an imported Llama 2 (docs/llama2.md)}"
TOKENIZER_MODEL=${TOKENIZER_MODEL:-$CHECKPOINT/huggingface/tokenizer.model}
OUT=${OUT:-runs/llama2-7b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # saved here, and loaded to continue

# Either file shows that the run has begun; a run that was killed while saving may lack the other.
if [[ -e $CHECKPOINT_PATH/latest_checkpointed_iteration.txt ]] ||
    compgen -G "$CHECKPOINT_PATH/iter_???????" > /dev/null; then
    START=(--load "$CHECKPOINT_PATH")
else
    START=(--load "$CHECKPOINT" --finetune)
fi

MODEL=(
    --use-checkpoint-args
    --seq-length 4096
    --attention-dropout 0
    --hidden-dropout 0
)

LAYOUT=(
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}"
    --use-distributed-optimizer
)

TRAINING=(
    --micro-batch-size 1
    --global-batch-size 64
    --train-iters 2000
    --lr 2e-5
    --min-lr 2e-6
    --lr-decay-style cosine
    --lr-warmup-iters 50
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    ${PRECISION---bf16} # PRECISION= (empty) trains in fp32
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model "$TOKENIZER_MODEL"
    --split 98,2,0
)

OUTPUT=(
    --save "$CHECKPOINT_PATH"
    --save-interval 500
    --eval-interval 500
    --eval-iters 10
    --log-interval 1
    --tensorboard-dir "$OUT/tensorboard"
)

exec python "$ROOT/tools/torchrun.py" --standalone --nproc-per-node "${NPROC_PER_NODE:-8}" \
    "$ROOT/pretrain_gpt.py" \
    "${START[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
