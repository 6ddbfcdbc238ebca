"""`python benchmarks/cluster`: see cli.py."""

import sys
from pathlib import Path

if not __package__:
    # started as a folder: Python has put the inside of the package on its path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cluster.cli import main

sys.exit(main())
