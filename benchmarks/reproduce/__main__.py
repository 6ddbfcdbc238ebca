"""`python -m benchmarks.reproduce` or `python benchmarks/reproduce`: see cli.py."""

import sys
from pathlib import Path

if not __package__:
    # started as a folder, as ranks are: Python has put the inside of the package on its path
    del sys.path[0]
# the benchmarks import each other as if they were installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproduce.cli import main

sys.exit(main())
