"""Compare how activations change in training at several widths, to check muP."""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):
    # When this file is run as a script, the package next to its folder may not be installed.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.tools.coordinate_check import main

if __name__ == "__main__":
    sys.exit(main())
