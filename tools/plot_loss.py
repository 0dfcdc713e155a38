"""Run `megatron.tools.plot_loss`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron.tools.plot_loss import main

    sys.exit(main())
