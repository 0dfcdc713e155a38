#!/usr/bin/env bash
# Continue each prompt, such as those of RealToxicityPrompts, by 20 tokens.
#
#   SAMPLES_PER_PROMPT=25 bash examples/detxoify_lm/generate-1.3b.sh prompts.jsonl \
#       checkpoints/gpt3-1.3b-detoxified
#
# The arguments are the file with prompts and the folder with checkpoints. Without SAMPLES_PER_PROMPT,
# each line is continued once: Megatron-LM's file augmented_prompts.jsonl repeats every prompt 25 times.
# The name of the output ends with the seed. To continue a run that was stopped, set SEED to that seed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${2:?give PROMPTS CHECKPOINT, then other flags if needed}"
PROMPTS=$1 CHECKPOINT=$2
shift 2
SEED=${SEED:-$RANDOM}
OUTPUT=${PROMPTS}_output_$(basename "$CHECKPOINT")_seed_$SEED.jsonl

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
    --sample-input-file "$PROMPTS" --sample-output-file "$OUTPUT" \
    --samples-per-prompt "${SAMPLES_PER_PROMPT:-1}" --seed "$SEED" \
    --out-seq-length 20 --temperature 1.0 --top_p 0.9 --max-batch-size 400 "$@"
