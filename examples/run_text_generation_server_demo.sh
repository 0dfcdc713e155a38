#!/usr/bin/env bash
# Serve the model that `make demo` has trained. The checkpoint determines the network, the tokenizer and
# the precision.
#
#   examples/run_text_generation_server_demo.sh
#
# Then run `python tools/text_generation_cli.py localhost:5000`, or open http://localhost:5000.
# Flags given to this script override those below, for example: --port 8000
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CHECKPOINT=${CHECKPOINT:-${CHECKPOINT_PATH:-runs/demo/checkpoints}}

exec python "$ROOT/tools/run_text_generation_server.py" \
    --load "$CHECKPOINT" --temperature 0.7 --top_k 40 "$@"
