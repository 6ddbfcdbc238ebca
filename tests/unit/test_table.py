"""Tables of many payloads: the bytes, sums and residuals of one by one, and the same refusals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from hvd_compress import BF16, QSGD, Adaptive, NoCompression, OneBit, Percentile, Threshold, TopK, wire
from hvd_compress.compressors import Compressor
from hvd_compress.engine import Ledger, Routing, Tensor
from hvd_compress.errors import WireError
from hvd_compress.exchange import Account, Bucket, checked_exchange, message, plan_together
from hvd_compress.exchange.table import Table
from hvd_compress.kernels.checksum import checksum
from tests.close import check_taken_back
from tests.outsider import SignSum
from tests.thorough import shown_by

SHAPES = {"a": (64, 512), "b": (300,), "c": (7, 1000), "d": (1,), "e": (33, 31), "f": (128, 784), "g": (9, 5000)}
COMPRESSORS = [
    OneBit(),
    OneBit(group=64),
    OneBit(error_feedback=False),
    Adaptive(pi=16),
    Adaptive(pi=4, sample=None, error_feedback=False),
    OneBit(sample=16),
    Adaptive(pi=16, group="tensor"),
    Adaptive(pi=16, coding="golomb"),
    Threshold(0.5),
    Threshold(0.5, coding="golomb"),
    TopK(0.02),
    TopK(k=50, coding="golomb"),
    Percentile(90, error_feedback=True),
    Percentile(99.5),
    Percentile(90, coding="golomb"),
    QSGD(bits=1),
    QSGD(bits=3),
    QSGD(bits=8, norm="max"),
    QSGD(bits=1, coding="elias"),
    QSGD(bits=4, coding="elias"),
    BF16(),
    NoCompression(),
    SignSum(),
]


def buckets(compressor: Compressor, ranks: int, exchange: str) -> list[Bucket]:
    plans = plan_together(exchange, {name: (shape, compressor) for name, shape in SHAPES.items()}, ranks)
    return [Bucket({n: Account(n, p, compressor, rank) for n, p in plans.items()}) for rank in range(ranks)]


def encode(of_ranks: Sequence[Bucket], step: int, rng: np.random.Generator) -> list[Any]:
    """Gradients with all that is not ordinary: one is left out, one is NaN, one is float64."""
    parcels = []
    for rank, of_rank in enumerate(of_ranks):
        for name, shape in SHAPES.items():
            x = rng.standard_normal(int(np.prod(shape))).astype(np.float32)
            if step == 1 and rank == 0 and name == "c":
                x[5] = np.nan
            if step == 2 and name == "b":
                of_rank.give(name, None)
            else:
                of_rank.give(name, x.astype(np.float64) if step == 3 and name == "a" else x)
        parcels.append(of_rank.parcel())
    return parcels


def last_message(of_ranks: Sequence[Bucket], parcels: Sequence[Any]) -> np.ndarray:
    """What the allgather brings."""
    if of_ranks[0].exchange.has_owners:
        ranks = len(of_ranks)
        sizes = [p.sizes or (p.buffer.size // ranks,) * ranks for p in parcels]
        ends = [np.cumsum([0, *s]) for s in sizes]
        parts = [[p.buffer[a:b] for a, b in pairwise(e)] for p, e in zip(parcels, ends, strict=True)]
        parcels = [b.advance("alltoall", np.concatenate([of[rank] for of in parts])) for rank, b in enumerate(of_ranks)]
    return np.concatenate([p.buffer for p in parcels])


def run(compressor: Compressor, ranks: int, exchange: str) -> list[Any]:
    """All bytes, results and residuals of some steps."""
    rng = np.random.default_rng(3)
    of_ranks = buckets(compressor, ranks, exchange)
    seen: list[Any] = []
    for step in range(5):
        message = last_message(of_ranks, encode(of_ranks, step, rng))
        finite = [b.arrive(message) for b in of_ranks]
        # raw values say nothing of themselves: their sum is what it is
        assert finite == [step != 1 or compressor.reducible] * ranks
        seen.append(message.tobytes())
        for b in of_ranks:
            results = b.finish(finite[0], 0.5)
            seen += [(name, None if r is None else (r.dtype, r.tobytes())) for name, r in sorted(results.items())]
            for t in b.accounts.values():
                seen += [t.step, *(None if r is None else r.tobytes() for r in (t.residual, t.owner_residual))]
    return seen


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each payload a table of its own."""
    tables = message.Message.tables

    def apart(self: message.Message, held: Any = None) -> list[Table]:
        numbers = sorted(number for table in tables(self, held) for number in table.numbers.tolist())
        return [Table(self.parts[i].compressor, [i], self.parts) for i in numbers]

    monkeypatch.setattr(message.Message, "tables", apart)


def shows(compressor: Compressor, ranks: int, exchange: str) -> bool:
    return ranks == 3 and exchange == ("allgather", "two_phase")[COMPRESSORS.index(compressor) % 2]


@pytest.mark.parametrize(
    ("compressor", "ranks", "exchange"),
    shown_by(shows, product(COMPRESSORS, [1, 2, 3], ["allgather", "two_phase"])),
    ids=repr,
)
def test_all_at_once_is_one_by_one(
    compressor: Compressor, ranks: int, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = run(compressor, ranks, exchange)
    one_by_one(monkeypatch)
    assert together == run(compressor, ranks, exchange)


def test_payloads_of_one_kind_share_a_table() -> None:
    def sizes(exchange: str = "allgather", **compressors: Compressor) -> list[int]:
        plans = plan_together(exchange, {name: ((64, 512), c) for name, c in compressors.items()}, 2)
        accounts = [Account(name, plans[name], c, 0) for name, c in compressors.items()]
        return [len(table.rows) for table in message.sent(accounts).tables()]

    assert sizes(a=OneBit(), b=OneBit(), c=Adaptive(), d=TopK(), e=Adaptive()) == [2, 2, 1]
    assert sizes(a=Threshold(0.5), b=Threshold(0.5), c=Threshold(0.25)) == [2, 1]
    # groups of more than 15 bits have entries of another type
    assert sizes(a=Adaptive(), b=Adaptive(group=40000), c=Adaptive()) == [2, 1]
    assert sizes("two_phase", a=OneBit(), b=OneBit(group=64)) == [2, 2]


def costs(exchange: str, left_out: str) -> list[dict[str, Any]]:
    """What the tensors of a bucket have cost each rank in some steps, without times."""
    tensors = [Tensor(name, (64, 512)) for name in "abc"]
    routing = Routing(OneBit(), checked_exchange(exchange), min_numel=100)
    ledgers = [Ledger(routing, 2, rank, tensors, Bucket) for rank in range(2)]
    of_ranks = [ledger.buckets[0] for ledger in ledgers]
    for step in range(4):
        parcels = []
        for b in of_ranks:
            for name in "abc":
                b.give(name, None if step == 1 and name in left_out else np.ones(64 * 512, np.float32))
            parcels.append(b.parcel())
        message = last_message(of_ranks, parcels)
        for b in of_ranks:
            b.arrive(message)
            b.finish(step != 2, 0.5)
    reports = [ledger.stats()["tensors"] for ledger in ledgers]
    assert reports == [ledger.stats()["tensors"] for ledger in ledgers]
    for report in reports:
        for of_tensor in report.values():
            assert of_tensor.pop("encode_seconds") > 0
            assert of_tensor.pop("decode_seconds") > 0
    return reports


@pytest.mark.parametrize("left_out", ["", "b", "ac"])
@pytest.mark.parametrize("exchange", ["allgather", "two_phase"])
def test_costs_of_all_at_once_are_those_of_one_by_one(
    exchange: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = costs(exchange, left_out)
    assert all(of_tensor["bytes_sent"] > 0 for report in together for of_tensor in report.values())
    one_by_one(monkeypatch)
    assert together == costs(exchange, left_out)


def test_a_class_made_from_one_with_kernels_cannot_encode_in_another_way() -> None:
    with pytest.raises(TypeError, match=r"Mine defines encode_body.*derive from hvd_compress.Compressor"):

        class Mine(OneBit):
            def encode_body(self, *_: Any) -> Any:
                return None


@pytest.mark.parametrize("compressor", [OneBit(), Adaptive(pi=16)], ids=repr)
def test_every_damage_is_a_wire_error_and_costs_no_residual(compressor: Compressor) -> None:
    rng = np.random.default_rng(5)
    of_ranks = buckets(compressor, 2, "allgather")
    message = last_message(of_ranks, encode(of_ranks, 0, rng))
    for b in of_ranks:
        b.arrive(message)
        b.finish(True, 1.0)
    before = {name: t.residual.copy() for name, t in of_ranks[0].accounts.items() if t.residual is not None}
    message = last_message(of_ranks, encode(of_ranks, 4, rng))
    used = [b for slot in slots_of(of_ranks[0], message.size) for b in slot]
    for at in [*used[:80], *rng.choice(used, 300)]:
        damaged = message.copy()
        damaged[at] ^= 1 << rng.integers(8)
        with pytest.raises(WireError):
            of_ranks[0].arrive(damaged)
    of_ranks[0].abandon()
    after = {name: of_ranks[0].accounts[name].residual for name in before}
    check_taken_back(after, before, largest=20.0)


def slots_of(of_rank: Bucket, size: int) -> list[range]:
    """The bytes of all payloads in the last message, without what they leave of their slots."""
    found = []
    at = 0
    for transfer in [*of_rank.accounts.values()] * 2:
        payload = transfer.plan.slots[0]
        found.append(range(at, at + 40 + (payload - 40) // 2))
        at += payload
    assert at == size
    return found


@pytest.mark.parametrize("compressor", [OneBit(), Adaptive(pi=16)], ids=repr)
def test_damage_on_the_way_to_an_owner_is_a_wire_error(compressor: Compressor) -> None:
    rng = np.random.default_rng(6)
    of_ranks = buckets(compressor, 2, "two_phase")
    owner = of_ranks[0]
    halves = []
    for parcel in encode(of_ranks, 0, rng):
        size = parcel.sizes[0] if parcel.sizes else parcel.buffer.size // 2
        halves.append(parcel.buffer[:size])
    message = np.concatenate(halves)
    heads = [0, *np.flatnonzero(message[:-4].view(np.uint8) == ord("h"))]
    heads = [at for at in heads if bytes(message[at : at + 4]) == b"hvdc"]
    assert len(heads) >= 2 * 3
    for head in heads:
        for at in (head, head + 8, head + 16, head + 36, head + 41):
            damaged = message.copy()
            damaged[at] ^= 4
            with pytest.raises(WireError):
                owner.advance("alltoall", damaged)
    # and what is not damaged is taken all the same
    assert owner.advance("alltoall", message).buffer.size


@pytest.mark.parametrize("kind", ["count", "index", "length"])
def test_a_forged_body_with_the_right_checksum_is_refused(kind: str) -> None:
    (of_rank,) = buckets(Adaptive(pi=16), 1, "allgather")
    message = last_message([of_rank], encode([of_rank], 0, np.random.default_rng(0))).copy()
    payload = message[: of_rank.accounts["a"].plan.slots[0]]
    nbytes = int(payload[16:24].view(np.uint64)[0])
    body = payload[wire.HEADER_BYTES : nbytes].view(np.uint16)
    if kind == "count":
        body[3] += 1000
    elif kind == "index":
        body[64 + 64 * 4 :][5] = 2 * 512 + 1  # 64 counts, 64 pairs of float32, then entries of 512 columns
    else:
        payload[32:36].view(np.uint32)[0] += 8
    words = payload[:nbytes].view(np.uint64)
    payload[36:40].view(np.uint32)[0] = checksum(words, 4)
    assert of_rank.arrive(message)
    with pytest.raises(WireError, match=r"'a'.*rank 0"):
        of_rank.finish(True, 1.0)
