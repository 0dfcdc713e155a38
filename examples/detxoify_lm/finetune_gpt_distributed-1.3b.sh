#!/usr/bin/env bash
# Train a GPT further on selected texts that it wrote itself (domain-adaptive training).
#
#   DATA_BLEND=data/pile_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/detxoify_lm/finetune_gpt_distributed-1.3b.sh \
#       data/nontoxic_text_document gpt3-1.3b-detoxified 2e-5 512 78 checkpoints/gpt3-1.3b
#
# The arguments are the data, the folder for the new checkpoints, the learning rate, the global batch
# size, the number of iterations and the folder of the GPT to start from. DATA_BLEND is the data that
# this GPT was pretrained on: 2% of it is validation data. Flags after the arguments override
# those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${6:?give DATA OUTPUT LR GLOBAL_BATCH ITERATIONS CHECKPOINT, then other flags if needed}"
DATA=$1 OUTPUT=$2 LR=$3 BATCH=$4 ITERATIONS=$5 CHECKPOINT=$6
shift 6
VALIDATION=(--eval-iters 0)
if [[ -n ${DATA_BLEND:-} ]]; then
    VALIDATION=(--data-path2 $DATA_BLEND --eval-interval "$ITERATIONS" --eval-iters 50)
fi

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

NETWORK=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
)

TRAINING=(
    --micro-batch-size 4
    --global-batch-size "$BATCH"
    --train-iters "$ITERATIONS"
    --lr "$LR"
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    ${PRECISION---fp16} # an empty PRECISION= trains in fp32, which a CPU needs
)

TOKENIZER=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}"
    --merge-file "${MERGE_FILE:-gpt2-merges.txt}"
)

exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" \
    "$ROOT/examples/detxoify_lm/finetune_gpt.py" \
    --finetune --no-load-optim --load "$CHECKPOINT" --save "$OUTPUT" --save-interval "$ITERATIONS" \
    --data-path "$DATA" --split 100,0,0 "${VALIDATION[@]}" --log-interval 1 \
    --log-validation-ppl-to-tensorboard --tensorboard-dir "$OUTPUT/tensorboard" \
    "${NETWORK[@]}" "${TRAINING[@]}" "${TOKENIZER[@]}" "$@"
