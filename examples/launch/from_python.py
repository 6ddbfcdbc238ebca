"""Start ranks from a Python program or a notebook, and get what each of them returns:

python examples/launch/from_python.py
"""

from __future__ import annotations

import os
from pathlib import Path

import horovod
from training import show, train

if __name__ == "__main__":
    # ranks import `training` from this folder, and whatever this process finds by PYTHONPATH
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    show(horovod.run(train, kwargs={"steps": 5}, num_proc=2, use_gloo=True))
