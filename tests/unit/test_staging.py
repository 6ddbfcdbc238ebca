from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

stage = pytest.importorskip("hvd_compress.torch._staging", reason="needs Horovod for torch").stage


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    (parameter * torch.arange(6.0).view(2, 3)).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


def test_a_gradient_that_only_an_exchange_holds_is_not_seen_elsewhere() -> None:
    # else every step would copy the residual
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    staged = stage(gradient_of(parameter), name="w")
    array = staged.flat.numpy()
    assert staged.shared
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not staged.is_seen_elsewhere()


def test_a_view_or_an_array_that_the_user_holds_is_seen() -> None:
    for look in (torch.Tensor.flatten, torch.Tensor.numpy):
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        kept = look(gradient_of(parameter))
        staged = stage(parameter.grad.detach(), name="w")
        array = staged.flat.numpy()
        assert staged.is_seen_elsewhere(), look
        del kept, array
