"""The collectives that the command line measures, on TensorFlow."""

from __future__ import annotations

from tests.parallel.workers.cli import cases_of

FRAMEWORK = "tensorflow"

cases = cases_of("tensorflow")
