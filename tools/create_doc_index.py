"""Run the successor of this script, as listed in tools/old_names.py."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from tools.old_names import run_old_name

    run_old_name(__file__)
