"""`python -m hvd_compress` is `hvd-compress`."""

from __future__ import annotations

import sys

from hvd_compress.cli import main

if __name__ == "__main__":
    sys.exit(main())
