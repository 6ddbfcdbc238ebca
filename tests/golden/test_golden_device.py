"""What devices make is frozen, too: of values whose sums are exact, the bytes of the host, but for the checksum."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key
from hvd_compress.kernels.table import sum_in_parts
from tests.device import Tables, host_encode, on_device
from tests.golden.test_golden import CASES, dyadic

NAMES = [name for name, (c, shape) in CASES.items() if np.prod(shape) > 0 and c.device_kernels(c.group_of(shape))]


@pytest.mark.parametrize("name", NAMES)
def test_devices_make_the_bytes_of_the_host(name: str) -> None:
    compressor, shape = CASES[name]
    group, numel = compressor.group_of(shape), int(np.prod(shape))
    there = Tables(compressor, [numel], group)
    here, residual = np.zeros(numel, np.float32), on_device(np.zeros(numel, np.float32))
    for step in range(2):
        gradient, key = dyadic(shape, step).reshape(-1), Key(step=step)
        given = on_device(gradient)
        feedback = compressor.feedback
        (made,) = there.encode(*(([residual], [given]) if feedback else ([given],)), keys=[key])
        expected = host_encode(compressor, here if feedback else gradient, gradient if feedback else None, group, key)
        expected = expected.copy()
        sum_in_parts(np.array([expected.ctypes.data]), np.array([expected.size]))
        assert made.tobytes() == expected.tobytes()
        assert np.array_equal(residual.cpu().numpy(), here)
        there.payloads.zero_()
