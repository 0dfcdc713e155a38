#!/usr/bin/env bash
# Pretrain GPT-3 1.3B on the GPUs of one machine, with the recipe gpt-1.3b.
#
#   DATA_PATH=data/my_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#   NPROC_PER_NODE=8 examples/pretrain_gpt_single_node.sh
#
# Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${VOCAB_FILE:?set it to the GPT-2 vocabulary file (JSON)}"
: "${MERGE_FILE:?set it to the GPT-2 merges file (text)}"
OUT=${OUT:-runs/gpt-1.3b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

LAUNCH=(
    --standalone
    --nproc-per-node "${NPROC_PER_NODE:-8}"
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 98,2,0
)

OUTPUT=(
    --save "$CHECKPOINT_PATH"
    --load "$CHECKPOINT_PATH"
    --log-interval 10
    --tensorboard-dir "$OUT/tensorboard"
)

# The recipe contains the model sizes and the layout for this number of GPUs.
exec python "$ROOT/tools/torchrun.py" "${LAUNCH[@]}" "$ROOT/pretrain_gpt.py" \
    --config "$ROOT/megatron/recipes/gpt-1.3b.yaml" "${DATA[@]}" "${OUTPUT[@]}" "$@"
