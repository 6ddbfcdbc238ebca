"""Ranks as actors of Ray:

python examples/launch/on_ray.py
"""

from __future__ import annotations

import os
from pathlib import Path

import ray
from horovod.ray import RayExecutor
from training import show, train

if __name__ == "__main__":
    # workers import `training` from this folder; on a cluster give working_dir, or install your package there
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, runtime_env=environment)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2, cpus_per_worker=1)
    executor.start()
    show(executor.run(train, kwargs={"steps": 5}))
    executor.shutdown()
    ray.shutdown()
