"""Uses the asynchronous server on NumPy arrays: mpirun -np 3 python examples/reference/mpi_names.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_compress import TopK
from hvd_compress.mpi import AsyncParameterServer


def linear_regression() -> None:
    """Rank 0 holds `w` and applies gradients as they come; all others compute them, each from its own data."""
    parameters = {"w": np.zeros(1000, np.float32)}

    def update(gradients: Mapping[str, Any]) -> None:
        parameters["w"] -= 0.1 * gradients["w"]

    random = np.random.default_rng()
    with AsyncParameterServer(parameters, update, compression=TopK(0.1)) as server:
        if server.is_server:
            server.serve()
        else:
            for _ in range(20):
                x = random.standard_normal((8, 1000), np.float32)
                server.step({"w": x.T @ (x @ parameters["w"] - x.sum(1)) / 8000})
    print(server.stats())


if __name__ == "__main__":
    linear_regression()
