"""`python -m unisono`: the command line."""

import sys

from unisono.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
