"""Compressors without Horovod, without ranks and without a framework:

python examples/start/without_ranks.py
"""

import numpy as np

from hvd_compress import OneBit, ThreadRanks
from hvd_compress.loopback import Loopback

numbers = np.random.default_rng(0)

# one array: encode, decode, and what is left for the next time
gradient = numbers.standard_normal((1000, 1000), np.float32)
residual = np.zeros_like(gradient)
payload = OneBit().encode(gradient, residual)  # residual now holds what the payload leaves out
decoded = OneBit().decode(payload)
print(f"{gradient.nbytes / payload.size:.0f} times fewer bytes")
print("nothing is lost:", np.allclose(decoded + residual, gradient, atol=1e-5))

# sixteen ranks, one after the other: what an exchange makes of their gradients
sixteen = Loopback(16, OneBit())
averages = sixteen.allreduce([numbers.standard_normal((100, 100), np.float32) for _ in range(16)], name="w")
print("all ranks have the same bytes:", all((a == averages[0]).all() for a in averages))


# four ranks, at once: a program with collectives on arrays, on threads
def program(ranks):
    return ranks.run("allreduce", "sum", np.full(2, 1 + ranks.position, np.float32))


print("1 + 2 + 3 + 4 =", ThreadRanks.run_all(4, program)[0][0])
