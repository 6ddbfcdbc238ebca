"""Ranks as tasks of Spark:

python examples/launch/on_spark.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import horovod.spark
from pyspark.sql import SparkSession
from training import show, train

if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    show(horovod.spark.run(train, kwargs={"steps": 5}, num_proc=2, use_gloo=True, env=dict(os.environ), verbose=1))
    spark.stop()
