#!/usr/bin/env bash
# Serve a 345M-parameter GPT on 8 GPUs, each of which holds an eighth of every layer. The checkpoint may
# have been saved in any layout.
#
#   CHECKPOINT=runs/gpt-345m/checkpoints VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       examples/run_text_generation_server_345M_8_tensor_parallel.sh
#
# Then run `python tools/text_generation_cli.py localhost:5000`, or open http://localhost:5000.
# Flags given to this script override those below, for example: --port 8000
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CHECKPOINT=${CHECKPOINT:-${CHECKPOINT_PATH:-}}
: "${CHECKPOINT:?set it to the folder with the checkpoints}"
: "${VOCAB_FILE:?set it to the GPT-2 vocabulary file (JSON)}"
: "${MERGE_FILE:?set it to the GPT-2 merges file (text)}"
TENSOR_PARALLEL=${TENSOR_PARALLEL:-8}

MODEL=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 1024
    --max-position-embeddings 1024
    ${PRECISION---bf16} # an empty PRECISION= computes in fp32
)

LAYOUT=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --pipeline-model-parallel-size 1
)

TOKENIZER=(
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
)

# Default values for requests.
SAMPLING=(
    --temperature 1.0
    --top_p 0.9
    --out-seq-length 1024
    --seed 42
)

exec python "$ROOT/tools/torchrun.py" --standalone --nproc-per-node "$TENSOR_PARALLEL" \
    "$ROOT/tools/run_text_generation_server.py" \
    --load "$CHECKPOINT" "${MODEL[@]}" "${LAYOUT[@]}" "${TOKENIZER[@]}" "${SAMPLING[@]}" "$@"
