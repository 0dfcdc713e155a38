"""Run `megatron.tools.bert_embedding`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from megatron.tools.bert_embedding import main

    sys.exit(main())
