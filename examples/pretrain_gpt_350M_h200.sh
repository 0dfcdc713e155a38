#!/usr/bin/env bash
# Pretrain a 350M-parameter GPT on one H200: 24 layers, hidden size 1024, sequence length 1024, GPT-2
# vocabulary, bf16. docs/benchmarks/models.md gives its speed ("GPT 350M on one H200", with half the
# batch).
#
#   DATA_PATH=data/my_text_document VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#   examples/pretrain_gpt_350M_h200.sh
#
# NPROC_PER_NODE=8 uses eight GPUs with the same batch. Flags given to this script override those below.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${DATA_PATH:?set it to the prefix of a .bin/.idx pair (tools/preprocess_data.py writes one)}"
: "${VOCAB_FILE:?set it to the GPT-2 vocabulary file (JSON)}"
: "${MERGE_FILE:?set it to the GPT-2 merges file (text)}"
OUT=${OUT:-runs/gpt-350m-h200}
CHECKPOINT_PATH=${CHECKPOINT_PATH:-$OUT/checkpoints} # save checkpoints here, and continue from them

MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    --attention-dropout 0
    --hidden-dropout 0
)

TRAINING=(
    --micro-batch-size 16
    --global-batch-size 128
    --train-iters 100
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
)

DATA=(
    --data-path "$DATA_PATH"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --split 95,5,0
)

OUTPUT=(
    --save "$CHECKPOINT_PATH"
    --save-interval 100
    --eval-interval 100
    --eval-iters 5
    --log-interval 10
    --tensorboard-dir "$OUT/tensorboard"
    --metrics-jsonl "$OUT/metrics.jsonl"
)

exec python "$ROOT/tools/torchrun.py" --standalone --nproc-per-node "${NPROC_PER_NODE:-1}" \
    "$ROOT/pretrain_gpt.py" \
    "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" "$@"
