"""`python -m inferscope`."""

from __future__ import annotations

import sys

from inferscope.cli import main

if __name__ == "__main__":
    sys.exit(main())
