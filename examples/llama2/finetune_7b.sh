#!/usr/bin/env bash
# Continue pretraining, or finetune, Llama 2 7B on one machine with 8 GPUs.
#
#   CHECKPOINT=checkpoints/llama2-7b DATA_PATH=data/my_text_document \
#       examples/llama2/finetune_7b.sh
#
# CHECKPOINT is the folder into which tools/checkpoint/util.py imported Meta's weights
# (docs/llama2.md). It determines the network and the tokenizer. A second run continues from the last
# checkpoint. With --dry-run, it prints what a run would need, without using a GPU. Flags given to this
# script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${CHECKPOINT:?set it to an imported Llama 2 (docs/llama2.md)}"
TOKENIZER_MODEL=${TOKENIZER_MODEL:-$CHECKPOINT/huggingface/tokenizer.model}
OUT=${OUT:-runs/llama2-7b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

# Either file shows that a run has started: one that was killed while saving may lack the other.
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
    --save-interval 500
    --eval-interval 500
    --eval-iters 10
    --log-interval 1
    --tensorboard-dir "$OUT/tensorboard"
)

exec python "$ROOT/tools/torchrun.py" --standalone --nproc-per-node "${NPROC_PER_NODE:-8}" \
    "$ROOT/pretrain_gpt.py" \
    "${START[@]}" "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
