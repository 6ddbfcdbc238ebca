from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

_staging = pytest.importorskip("hvd_compress.torch._gradients.staging", reason="needs Horovod for torch")
all_finite, has_room, hold, overlapping = _staging.all_finite, _staging.has_room, _staging.hold, _staging.overlapping

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("numel", [1, 7, 1000])
def test_one_value_that_is_not_finite_is_found(dtype: torch.dtype, numel: int) -> None:
    values = torch.full((numel,), 1e4, dtype=dtype)
    assert all_finite(values)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for place in {0, numel // 2, numel - 1}:
            spoiled = values.clone()
            spoiled[place] = bad
            assert not all_finite(spoiled)
            assert not all_finite(spoiled.view(1, -1).to_sparse())


def test_nothing_is_finite() -> None:
    assert all_finite(torch.zeros(0))
    assert all_finite(torch.zeros(3, 2).to_sparse())


@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_read_the_gradient_itself_where_they_can(dtype: torch.dtype) -> None:
    gradient = torch.arange(6.0).view(2, 3).to(dtype)
    held = hold(gradient, "w")
    assert held.flat.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert held.is_copy == (dtype in (torch.float16, torch.bfloat16))
    assert held.flat.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    if not held.is_copy:
        held.flat[0] = 7.0
        assert gradient[0, 0] == 7.0


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "a part", "expanded"])
def test_other_strides_are_copied_and_the_result_has_them(layout: str) -> None:
    gradient = {
        "channels_last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": lambda: torch.rand(4, 5).t(),
        "a part": lambda: torch.rand(4, 10)[:, 2:7],
        "expanded": lambda: torch.rand(4, 1).expand(4, 5),
    }[layout]()
    held = hold(gradient, "w")
    assert held.is_copy
    assert held.flat.tolist() == gradient.flatten().tolist()
    assert has_room(gradient) == (layout != "expanded")
    held.flat[...] = np.arange(held.flat.size)
    restored = held.restored(apart=not has_room(gradient))
    assert restored.flatten().tolist() == list(range(held.flat.size))
    assert (restored is gradient) == has_room(gradient)
    assert restored.shape == gradient.shape


@pytest.mark.parametrize("dtype", TYPES)
def test_a_result_that_is_apart_leaves_the_gradient_what_it_was(dtype: torch.dtype) -> None:
    gradient = torch.arange(6.0).view(2, 3).t().to(dtype)
    before = gradient.clone()
    held = hold(gradient, "w", keep=True)
    held.flat[...] = 7.0
    restored = held.restored(apart=True)
    assert (restored == 7).all()
    assert (restored.dtype, restored.shape) == (gradient.dtype, gradient.shape)
    assert torch.equal(gradient, before)


def test_memory_for_a_copy_is_used_where_it_fits() -> None:
    gradient = torch.arange(6.0).to(torch.float16)
    memory = np.empty(6, np.float32)
    assert hold(gradient, "w", spare=memory).flat is memory
    for other in (np.empty(5, np.float32), np.empty(6, np.float64)):
        held = hold(gradient, "w", spare=other)
        assert held.flat is not other
        assert held.flat.tolist() == gradient.tolist()


def test_a_write_and_other_memory_are_noticed() -> None:
    gradient = torch.arange(6.0)
    assert not hold(gradient, "w").has_changed
    held = hold(gradient, "w")
    gradient.mul_(2)
    assert held.has_changed
    assert not held.has_moved
    held = hold(gradient, "w")
    gradient.data = torch.ones(6)
    assert held.has_moved
    held = hold(gradient, "w")
    gradient.data = gradient.data[:3]
    assert held.has_moved


def test_what_exchanges_write_is_no_write_of_the_user() -> None:
    gradient = torch.arange(6.0).view(2, 3).t()
    held = hold(gradient, "w")
    held.flat[...] = 1
    held.restored(apart=False)
    assert not held.has_changed
    assert (gradient == 1).all()


def test_gradients_of_inference_mode_are_held() -> None:
    with torch.inference_mode():
        gradient = torch.arange(6.0)
        held = hold(gradient, "w", keep=True)
        assert not held.has_changed
        assert held.flat.tolist() == gradient.tolist()


def test_a_gradient_of_no_floating_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"gradient of 'w' is torch\.int32"):
        hold(torch.zeros(3, dtype=torch.int32), "w")


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], set()),
        ([(0, 8), (8, 16)], set()),
        ([(8, 16), (0, 8), (8, 16)], {8}),
        ([(0, 100), (8, 16), (40, 44), (100, 104)], {0, 8, 40}),
        ([(0, 0), (0, 0)], set()),
    ],
)
def test_spans_that_share_memory_are_found(spans: list[tuple[int, int]], expected: set[int]) -> None:
    assert overlapping(spans) == expected
