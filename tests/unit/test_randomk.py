"""RandomK: the same entries on all ranks, other ones in each step, and none twice."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import Key, RandomK, wire
from hvd_compress.compressors.randomk import drawn
from hvd_compress.errors import WireError
from hvd_compress.loopback import Loopback


def words(low: int, high: int = 0) -> tuple[np.uint32, np.uint32]:
    return np.uint32(low), np.uint32(high)


def oracle(m: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stich et al. 2018, algorithm 1: what is sent of the memory plus the gradient, and the memory after it."""
    sent = np.zeros_like(m)
    for i in chosen:
        sent[i] = m[i]
    return sent, m - sent


@pytest.mark.parametrize("exchange", ["two_phase", "allgather"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_mean_of_the_same_entries_arrives_and_the_rest_is_owed(exchange: str, ranks: int) -> None:
    loopback = Loopback(ranks, RandomK(ratio=0.1, seed=3), exchange)
    memory = np.zeros((ranks, 400), np.float32)
    touched = np.zeros(400, bool)
    for step in range(5):
        grads = [np.random.default_rng([rank, step]).standard_normal(400).astype(np.float32) for rank in range(ranks)]
        result = loopback.allreduce(grads, name="w")[0]
        chosen = np.flatnonzero(result)
        assert chosen.size == pytest.approx(40, abs=ranks), "all ranks have chosen the same entries"
        sent, memory = zip(*(oracle(m + g, chosen) for m, g in zip(memory, grads, strict=True)), strict=True)
        np.testing.assert_allclose(result, np.mean(sent, axis=0), atol=1e-6)
        for rank in range(ranks):
            np.testing.assert_allclose(loopback.residual("w", rank), memory[rank], atol=1e-6)
            assert not loopback.owner_residual("w", rank).any(), "nothing of a sum is left out"
        touched[chosen] = True
    assert touched.sum() > 120, "each step draws anew"


def test_the_draw_depends_on_seed_tensor_and_step_and_on_nothing_else() -> None:
    x = np.arange(1, 1001, dtype=np.float32)

    def chosen(seed: int, key: Key) -> list[int]:
        compressor = RandomK(ratio=0.05, seed=seed)
        return np.flatnonzero(compressor.decode(compressor.encode(x, key=key))).tolist()

    key = Key(seed=1, name="w", step=4)
    np.random.seed(1)  # noqa: NPY002 - GRACE sets the global seed, and DGC's draws follow from it
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    assert chosen(1, key) == chosen(1, Key(seed=1, name="w", step=4, rank=3, hop=1))
    assert (before == np.random.get_state()[1]).all()  # noqa: NPY002
    for other in (Key(2, "w", 4), Key(1, "v", 4), Key(1, "w", 5), Key(1, "w", 4, chunk=1)):
        assert chosen(1, key) != chosen(1, other)


@pytest.mark.parametrize("numel", [1, 2, 3, 10, 63, 64, 65, 1000])
def test_draws_are_different_numbers_in_order(numel: int) -> None:
    for count in {1, max(1, numel // 3), max(1, numel - 1), numel}:
        numbers = drawn(words(5, numel), numel, count)
        assert numbers.size == count
        assert (np.diff(numbers) > 0).all()
        assert 0 <= numbers[0] <= numbers[-1] < numel


def test_every_element_is_drawn_as_often_as_any_other() -> None:
    counts = np.zeros(100)
    for low in range(4000):
        counts[drawn(words(low, 77), 100, 10)] += 1
    # 400 expected, with a standard deviation of 19
    assert 300 < counts.min() <= counts.max() < 500


def test_no_index_travels() -> None:
    compressor = RandomK(ratio=0.01)
    assert compressor.encode(np.ones(10_000, np.float32)).size == wire.HEADER_BYTES + 8 + 4 * 100


def test_a_forged_number_of_entries_is_refused() -> None:
    compressor = RandomK(ratio=0.5)
    payload = compressor.encode(np.ones(8, np.float32))
    for entries in (0, 9, 1, 2**32 - 1):
        forged = payload.copy()
        wire.seal(
            forged, codec=compressor.codec, shape=(8,), group=1, parameter=0, entries=entries, float64=False,
            nonfinite=False,
        )  # fmt: skip
        with pytest.raises(WireError):
            compressor.decode(forged)
