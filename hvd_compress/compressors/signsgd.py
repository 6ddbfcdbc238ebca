"""Send signs, of which the majority decides: signSGD with majority vote (Bernstein et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import ClassVar

import numpy as np

from hvd_compress import wire
from hvd_compress.compressors.base import TableCompressor
from hvd_compress.compressors.settings import check_feedback, check_int, check_real
from hvd_compress.compressors.tables import DeviceKernels, Kernels
from hvd_compress.kernels import signsgd as kernels

__all__ = ["SignSGD"]

_GROUP = 64  # elements are divided among owners where words of signs end


@dataclass(frozen=True)
class SignSGD(TableCompressor):
    """Sends the sign of each element; what arrives is the sign that most ranks have sent, times `scale`.

    Payload: 1 bit per element. The owner of an element sums the signs of all ranks and answers with the sign of the
    sum, so every rank gets +scale or -scale with op=Average, and the number of ranks times that with op=Sum. A zero is
    sent as a random sign, and a tie is decided at random, so that neither pushes in one direction. The magnitudes of
    gradients are lost, so the learning rate has to be about that of Adam. Hierarchical exchanges take the vote among
    hosts, each of which votes with the sign of its sum. An allgather has no owner that could decide, and is refused;
    "auto" takes two phases. Tensors that go uncompressed because of `min_numel` keep their magnitudes: give min_numel=1
    to avoid this. A parameter without a gradient on any rank counts as zeros, and moves by `scale` at random in each
    step: freeze it.

    Source: Bernstein et al. 2018, algorithm 1 of "signSGD with majority vote". Differences: zeros and ties are random;
    Signum's momentum is not here, since optimizers are given the combined gradient: see `hvd.Signum` for PyTorch.
    `OneBit` and `EFSignSGD` also send one bit, and keep magnitudes.

    Args:
        scale: what a sign stands for, greater than 1e-30, at most 1e30. A GradScaler divides it by the loss scale.
        error_feedback: keep what was not sent and add it to the next gradient; `scale` must then be about the mean
            magnitude of gradients, or residuals grow without bound.
        seed: of the signs of zeros and ties; each tensor, step and rank draws its own.

    Raises:
        ValueError: a setting out of its range.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import SignSGD
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(3, SignSGD(), exchange="two_phase")
        >>> ranks.allreduce([np.array(x, np.float32) for x in ([9, -1], [-1, -1], [-1, 5])])[0]
        array([-1., -1.], dtype=float32)
    """

    scale: float = 1.0
    error_feedback: bool | str = False
    seed: int = 0

    id: ClassVar[str] = "signsgd"
    codec: ClassVar[int] = 11
    votes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_real(self, "scale", self.scale, above=1e-30, most=1e30)
        check_feedback(self, self.error_feedback)
        check_int(self, "seed", self.seed, 0, 2**63 - 1)

    def for_sum(self, ranks: int) -> SignSGD:
        return replace(self, scale=self.scale * ranks)

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return _GROUP

    def body_bytes(self, numel: int, group: int) -> int:
        return (numel + 7) // 8

    def misfit(self, header: wire.Header) -> str | None:
        value = np.uint32(header.parameter).view(np.float32)
        return None if 0 < value < np.inf else f"payload of signsgd with a scale of {value}"

    @property
    def draws(self) -> bool:
        return True

    def kernels(self, group: int) -> Kernels:
        return _kernels(self)

    def device_kernels(self, group: int) -> DeviceKernels | None:
        return _device_kernels(self)


@cache
def _kernels(compressor: SignSGD) -> Kernels:
    scale = np.float32(compressor.scale)
    encode = partial(kernels.encode_rows, compressor.codec, scale, int(scale.view(np.uint32)))
    return Kernels(encode, kernels.decode_rows)


@cache
def _device_kernels(compressor: SignSGD) -> DeviceKernels:
    from hvd_compress.kernels.cuda import signsgd

    scale = np.float32(compressor.scale)
    parameter = int(scale.view(np.uint32))
    encode = partial(signsgd.encode, codec=compressor.codec, scale=float(scale), parameter=parameter)
    return DeviceKernels(encode, signsgd.verify, signsgd.decode)
