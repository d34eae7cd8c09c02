"""`python -m unisono`: the command line."""

from __future__ import annotations

import sys

from unisono.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
