from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

_staging = pytest.importorskip("hvd_compress.torch._staging", reason="needs Horovod for torch")
all_finite, flat_of, stage = _staging.all_finite, _staging.flat_of, _staging.stage
is_ours_alone, is_seen_elsewhere = _staging.is_ours_alone, _staging.is_seen_elsewhere
own_memory, tensor_of = _staging.own_memory, _staging.tensor_of


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    (parameter * torch.arange(6.0).view(2, 3)).sum().backward()
    assert parameter.grad is not None
    return parameter.grad


def test_a_gradient_that_only_an_exchange_holds_is_not_seen_elsewhere() -> None:
    # else every step would copy the residual
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    own = own_memory(gradient_of(parameter))
    assert own is not None
    array = flat_of(own)
    assert array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not is_seen_elsewhere(own)


def test_a_view_or_an_array_that_the_user_holds_is_seen() -> None:
    for look in (torch.Tensor.flatten, torch.Tensor.numpy):
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        own = own_memory(gradient_of(parameter))
        assert own is not None
        array = flat_of(own)
        kept = look(parameter.grad)
        assert is_seen_elsewhere(own), look
        del kept, array


def test_memory_that_another_tensor_shows_too_is_not_written_to() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    kept = gradient_of(parameter).flatten()
    assert own_memory(parameter.grad) is None
    staged = stage(parameter.grad, name="w")
    staged.memory.fill_(7.0)
    assert kept.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_to_be_kept_is_not_written_to(dtype: torch.dtype) -> None:
    gradient = torch.arange(6.0).view(2, 3).to(dtype)
    staged = stage(gradient, name="w", keep=True)
    staged.memory.fill_(7.0)
    assert gradient.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    restored = staged.restore(staged.memory)
    assert restored.shape == gradient.shape
    assert restored.dtype == dtype
    assert gradient.flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_strides_of_a_gradient_to_be_kept_are_those_of_its_result() -> None:
    gradient = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    staged = stage(gradient, name="w", keep=True)
    assert staged.source is None
    assert staged.memory.tolist() == gradient.flatten().tolist()
    assert staged.restore(staged.memory).stride() == gradient.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_to_be_kept_is_read_where_it_lies(dtype: torch.dtype) -> None:
    gradient = torch.arange(6.0).view(2, 3).to(dtype)
    staged = stage(gradient, name="w", keep=True)
    assert staged.source is not None
    assert staged.source.data_ptr() == gradient.data_ptr() != staged.memory.data_ptr()
    assert stage(gradient, name="w").source is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_memory_is_used_where_it_fits(dtype: torch.dtype) -> None:
    gradient = torch.arange(6.0).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    memory = torch.empty(6, dtype=wide)
    fits = stage(gradient, name="w", keep=True, memory=memory)
    assert fits.memory.data_ptr() == memory.data_ptr()
    for other in (torch.empty(5, dtype=wide), torch.empty(6, dtype=torch.int8)):
        staged = stage(gradient, name="w", keep=True, memory=other)
        assert staged.memory.data_ptr() != other.data_ptr()
        assert (staged.memory if staged.source is None else staged.source).tolist() == gradient.tolist()


def test_memory_of_a_step_becomes_a_tensor_again_without_another_wrapper() -> None:
    tensor = torch.arange(6.0)
    array = tensor.numpy()
    again = tensor_of(array)
    assert again.data_ptr() == tensor.data_ptr()
    assert again.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    part = tensor_of(array[2:4])
    assert part.tolist() == [2.0, 3.0]


LOOKS = {
    "a view": lambda tensor: tensor[2:],
    "an array": lambda tensor: tensor.numpy(),
    "a part of an array": lambda tensor: tensor.numpy()[2:],
    "dlpack": lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a graph": lambda tensor: (torch.ones(6, requires_grad=True) * tensor).sum(),
    "another process": lambda tensor: tensor.share_memory_(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_at_memory_is_noticed(look: str) -> None:
    ours = torch.arange(6.0)
    assert is_ours_alone(ours)
    handed_out = ours.view(2, 3).detach().view(-1).detach()
    held = LOOKS[look](handed_out)
    del handed_out
    assert not is_ours_alone(ours), held
    if look != "another process":  # it may still have it
        del held
        assert is_ours_alone(ours)


def test_memory_made_in_inference_mode_is_not_used_outside() -> None:
    with torch.inference_mode():
        made_there = stage(torch.ones(6), name="w", keep=True).memory
        assert tensor_of(made_there.numpy()).data_ptr() == made_there.data_ptr()
        assert stage(torch.ones(6), name="w", keep=True, memory=made_there).memory is made_there
    outside = stage(torch.ones(6), name="w", keep=True, memory=made_there).memory
    assert not outside.is_inference()
    result = tensor_of(made_there.numpy())
    (torch.ones(6, requires_grad=True) * result).sum().backward()
