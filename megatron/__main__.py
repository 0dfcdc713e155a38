"""`python -m megatron`: the command line that is installed as `megatron`."""

import sys

from megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
