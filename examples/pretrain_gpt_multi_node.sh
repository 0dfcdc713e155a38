#!/usr/bin/env bash
# Pretrain GPT-3 13B on several machines, with the recipe gpt-13b.
#
#   DATA_PATH=data/my_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 examples/pretrain_gpt_multi_node.sh
#
# Start it on each machine with that machine's NODE_RANK (0, 1, ...) and the address of machine 0.
# Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${VOCAB_FILE:?set it to the GPT-2 vocabulary file (JSON)}"
: "${MERGE_FILE:?set it to the GPT-2 merges file (text)}"
OUT=${OUT:-runs/gpt-13b}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

LAUNCH=(
    --nproc-per-node "${NPROC_PER_NODE:-8}"
    --nnodes "${NNODES:-1}"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-6000}"
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
    --config "$ROOT/megatron/recipes/gpt-13b.yaml" "${DATA[@]}" "${OUTPUT[@]}" "$@"
