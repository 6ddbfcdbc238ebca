"""The parts of CompressedAdam and DeMo that know no ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hvd_compress._torch.dct import Chunks, cosines
from hvd_compress._torch.moments import Moments, add_update, direction
from hvd_compress.schedules import Renewals


def dct_oracle(x: np.ndarray) -> np.ndarray:
    """The orthonormal DCT-II of a vector, as it is defined: a sum for each coefficient."""
    n = len(x)
    raw = [sum(x[i] * np.cos(np.pi * (i + 0.5) * k / n) for i in range(n)) for k in range(n)]
    return np.array([value * np.sqrt((1 if k == 0 else 2) / n) for k, value in enumerate(raw)])


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_cosines_are_the_transform(n: int) -> None:
    x = np.random.default_rng(n).normal(size=n)
    mine = cosines(n, torch.float64, torch.device("cpu")) @ torch.from_numpy(x)
    np.testing.assert_allclose(mine.numpy(), dct_oracle(x), atol=1e-12)


@pytest.mark.parametrize("shape", [(), (5,), (130,), (8, 8), (10, 19), (3, 4, 5), (1, 9), (0,), (4, 0)])
def test_chunks_are_transformed_and_restored(shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
    chunks = Chunks(shape, 8)
    coefficients = chunks.coefficients(x)
    assert coefficients.shape == (chunks.count, chunks.elements)
    torch.testing.assert_close(chunks.restored(coefficients), x)


def test_a_chunk_of_a_matrix_is_transformed_in_both_dimensions() -> None:
    x = np.random.default_rng(1).normal(size=(8, 12))
    block = x[4:8, 8:12]
    expected = np.array([dct_oracle(row) for row in np.array([dct_oracle(column) for column in block.T]).T])
    mine = Chunks((8, 12), 4).coefficients(torch.from_numpy(x))[1 * 3 + 2].view(4, 4)
    np.testing.assert_allclose(mine.numpy(), expected, atol=1e-12)


def test_the_largest_coefficients_of_each_chunk_are_kept() -> None:
    chunks = Chunks((4, 8), 4)
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 16)))
    kept = chunks.largest(x, 3)
    for row, all_of_row in zip(kept, x, strict=True):
        threshold = all_of_row.abs().sort().values[-3]
        assert torch.equal(row, torch.where(all_of_row.abs() >= threshold, all_of_row, 0.0))


@pytest.mark.parametrize(
    ("shape", "size", "k", "kept"),
    [((64, 64), 64, 32, 32), ((8, 64), 64, 32, 4), ((640,), 64, 32, 1), ((1, 1), 64, 9, 1)],
)
def test_smaller_chunks_keep_the_same_share(shape: tuple[int, ...], size: int, k: int, kept: int) -> None:
    assert Chunks(shape, size).kept(k) == kept


def due_oracle(warmup: int, renewals: int, most: int) -> list[int]:
    """Steps made before each renewal, by counting."""
    found, at, gap = [], warmup - 1, 2
    while at < most:
        for _ in range(renewals):
            at += gap
            found.append(at)
        gap *= 2
    return [step for step in found if step < most]


@pytest.mark.parametrize(("warmup", "renewals"), list(itertools.product([1, 5, 30], [1, 2, 3, 16])))
def test_renewals_come_at_doubling_intervals(warmup: int, renewals: int) -> None:
    schedule = Renewals(warmup, renewals)
    assert [s for s in range(3000) if schedule.is_due(s)] == due_oracle(warmup, renewals, 3000)
    assert [s for s in range(40) if schedule.is_warming(s)] == list(range(warmup))


@pytest.mark.parametrize("settings", [{"warmup_steps": 0}, {"warmup_steps": 1, "renewals": 0}, {"warmup_steps": True}])
def test_a_schedule_out_of_range_is_refused(settings) -> None:
    with pytest.raises(ValueError, match="must be"):
        Renewals(**settings)


def moments(p: torch.Tensor, **group) -> Moments:
    options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **group}
    zeros = torch.zeros_like(p)
    return Moments(p, options, {"step": 0, "variance_steps": 0, "exp_avg": zeros, "exp_avg_sq": zeros.clone()})


def test_steps_with_gradients_are_those_of_torchs_adamw() -> None:
    mine, theirs = torch.ones(50), torch.nn.Parameter(torch.ones(50))
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, foreach=False)
    m = moments(mine, weight_decay=0.1)
    for step in range(20):
        g = torch.from_numpy(np.random.default_rng(step).normal(size=50)).float()
        theirs.grad = g
        adamw.step()
        m.take_gradient(g, is_frozen=False)
        add_update(m, m.momentum / m.scale())
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_neither_bound_nor_mask_hides_what_is_not_finite(bad: float) -> None:
    m = moments(torch.ones(4))
    m.take_gradient(torch.tensor([1.0, 0.0, 1.0, 1.0]), is_frozen=False)
    unseen = m.variance == 0
    assert unseen.tolist() == [False, True, False, False]
    for place in range(4):
        gradient = torch.ones(4)
        gradient[place] = bad
        assert not direction(m, gradient, unseen).isfinite().any()
    assert direction(m, torch.ones(4), unseen).isfinite().all()


def test_a_gradient_that_grew_is_bounded_as_adam_bounds_it() -> None:
    m = moments(torch.ones(2))
    m.take_gradient(torch.tensor([1e-6, 1.0]), is_frozen=False)
    m.momentum.zero_()
    mine = direction(m, torch.tensor([1e6, 1.0]), None)
    torch.testing.assert_close(mine, 0.1 * torch.tensor([0.001**-0.5, 1.0]))


def test_an_element_without_variance_takes_its_first_gradient_for_it() -> None:
    m = moments(torch.ones(3))
    for _ in range(4):
        m.take_gradient(torch.tensor([1.0, 0.0, 0.0]), is_frozen=False)
    before = m.variance.clone()
    m.take_gradient(torch.tensor([5.0, -0.25, 0.0]), is_frozen=True)
    assert m.variance[0] == before[0]
    torch.testing.assert_close(m.scale(), torch.tensor([1.0, 0.25, 0.0]), atol=1e-6, rtol=1e-6)
