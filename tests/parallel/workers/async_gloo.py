"""An asynchronous parameter server where there is no MPI."""

from __future__ import annotations

import pytest
import torch

import hvd_compress.torch as hvd
from hvd_compress.errors import UnsupportedError
from tests.parallel.cases import Cases

cases = Cases()


@cases.add
def gloo_is_refused_with_the_remedy() -> None:
    model = torch.nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"this run uses Gloo.*Start it with mpirun or horovodrun --mpi, or use"):
        hvd.AsyncParameterServerOptimizer(sgd, model.named_parameters())
