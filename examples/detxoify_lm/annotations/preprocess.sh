#!/usr/bin/env bash
# Turn selected texts into token ids.
#
#   VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/detxoify_lm/annotations/preprocess.sh nontoxic.jsonl data/nontoxic
#
# The arguments are the texts and the prefix of the output, data/nontoxic_text_document.{bin,idx}. Flags
# after them override those below, for example with another --tokenizer-type.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
: "${2:?give INPUT OUTPUT_PREFIX, then other flags if needed}"
INPUT=$1 PREFIX=$2
shift 2

exec python "$ROOT/tools/preprocess_data.py" --input "$INPUT" --output-prefix "$PREFIX" \
    --tokenizer-type GPT2BPETokenizer \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    --append-eod --workers "${WORKERS:-20}" "$@"
