#!/usr/bin/env bash
# Let a GPT write texts without a prompt. To continue a run that was stopped, start it again.
#
#   NPROC_PER_NODE=8 bash examples/detxoify_lm/self_generation/selfgenerate-1.3b-unconditional.sh \
#       100000 checkpoints/gpt3-1.3b 2333
#
# The arguments are the number of texts, the folder with checkpoints and the seed. Every process has
# a copy of the model, unless other flags split it. The texts are written to
# selfgeneration/unconditional_generation_gpt3-1.3b/2333.out, one JSON object per line.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
: "${3:?give NUM_SAMPLES CHECKPOINT SEED, then other flags if needed}"
NUM_SAMPLES=$1 CHECKPOINT=$2 SEED=$3
shift 3
OUT=${OUT:-selfgeneration/unconditional_generation_$(basename "$CHECKPOINT")}
mkdir -p "$OUT"

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-1}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
)

# Megatron-LM's checkpoints do not contain the tokenizer's files.
TOKENIZER=()
if [[ -n ${VOCAB_FILE:-} ]]; then
    TOKENIZER=(--tokenizer-type GPT2BPETokenizer --vocab-file "$VOCAB_FILE" --merge-file "$MERGE_FILE")
fi

exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" \
    "$ROOT/examples/detxoify_lm/generate_samples_gpt.py" \
    --load "$CHECKPOINT" "${TOKENIZER[@]}" \
    --num-samples "$NUM_SAMPLES" --genfile "$OUT/$SEED.out" --seed "$SEED" \
    --out-seq-length 1000 --temperature 1.0 --top_p 0.9 --max-batch-size 150 "$@"
