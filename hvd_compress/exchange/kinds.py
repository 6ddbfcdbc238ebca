"""The kinds of exchange: who sums which elements, and which collectives that takes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

from hvd_compress.compressors import Compressor
from hvd_compress.errors import ContractError, UnsupportedError
from hvd_compress.exchange.inside_settings import checked_inside
from hvd_compress.exchange.plan import Plan, chunk_bounds, cuts_within, ring_bytes, saves_bytes, sent_bytes
from hvd_compress.exchange.raw import checked

__all__ = ["COLLECTIVE_BYTES", "AllGather", "Dense", "Exchange", "FewestBytes", "Hierarchical", "TwoPhase"]

# What a collective costs besides its bytes, in bytes: between the 80 kB at which four ranks broke even on links of
# 1 Gbit/s, and the 10 kB of 100 Mbit/s. Auto measures the link instead.
COLLECTIVE_BYTES = 2**15


_ids: dict[str, str] = {}
"""The names of all classes of exchanges, by their ids."""


@dataclass(frozen=True)
class Exchange:
    """A way to combine the gradients of all ranks: who sums which elements, and which collectives that takes.

    With owners, each element is summed by one rank, its owner: all ranks send the owner what they have encoded of it,
    and the owner encodes the sum and sends it to all. Without owners, every rank sends all that it has encoded to all
    others, and each of them makes the sums itself.

    To divide the work in another way, derive from `TwoPhase`, and give it an `id` and `owners`. Settings are fields of
    a frozen dataclass. All ranks have to use equal exchanges; they compare the settings and the owners.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit, TwoPhase
        >>> from hvd_compress.loopback import Loopback
        >>> class FirstHalf(TwoPhase):
        ...     id = "first_half"
        ...     def owners(self, ranks):
        ...         return range((ranks + 1) // 2)
        >>> ranks = Loopback(4, OneBit(), exchange=FirstHalf())
        >>> ranks.allreduce([np.full(64, rank, np.float32) for rank in range(4)], name="w")[0].max()
        np.float32(1.5)
        >>> ranks.bounds("w")
        (0, 32, 64, 64, 64)
    """

    id: ClassVar[str]
    """The name in settings and statistics."""
    collectives: ClassVar[tuple[str, ...]]
    """What follows each stage. All but "allgather" and "broadcast" are alltoalls, some of them with empty parts."""
    has_owners: ClassVar[bool] = True
    """Whether each element is summed, and encoded again, by one rank only."""
    uses_hosts: ClassVar[bool] = False
    """Whether it matters which ranks share a host."""
    takes_all: ClassVar[bool] = False
    """Whether tensors go this way where it saves no bytes, too, and where they are not compressed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = f"{cls.__module__}.{cls.__qualname__}"
        own = vars(cls).get("id")
        if not isinstance(own, str) or _ids.setdefault(own, name) != name:
            has = f"id={own!r}, as {_ids[own]} has" if isinstance(own, str) else "none"
            raise ContractError(
                f"{name}: a class of exchanges needs an id of its own, a string, by which ranks and statistics tell it "
                f"from others; it has {has}"
            )
        if not cls.has_owners and "owners" in vars(cls):
            raise ContractError(f"{name}: it has owners(), and has_owners=False. Derive from TwoPhase to choose owners")
        if cls.uses_hosts != ("scatter_inside" in getattr(cls, "collectives", ())):
            raise ContractError(
                f"{name}: uses_hosts={cls.uses_hosts} does not fit its collectives. Derive from Hierarchical"
            )

    @property
    def sends_by_mpi(self) -> bool:
        """Whether messages of MPI take the place of Horovod's collectives."""
        return False

    def get_config(self) -> dict[str, Any]:
        """Return the settings as a JSON-able dict, which ranks compare."""
        return {"id": self.id, **asdict(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Exchange:
        """Create an exchange from a configuration that `get_config` returned.

        Raises:
            ValueError: not a configuration of this class, or of one that derives from it; a wrong setting.

        Example:
            >>> from hvd_compress import Blockwise, Exchange, Hierarchical
            >>> exchange = Hierarchical(inside=Blockwise(bits=8))
            >>> Exchange.from_config(exchange.get_config()) == exchange
            True
        """
        given: Any = config
        settings = dict(given) if isinstance(given, dict) else {}
        name = settings.pop("id", None)
        kinds = {kind.id: kind for kind in _with_heirs(cls) if "id" in vars(kind)}
        if name not in kinds:
            raise ValueError(
                f"configuration {config!r}: must be a dict, as get_config() returns, with one of these as id: "
                f"{', '.join(map(repr, sorted(kinds)))}. A class of your own must be imported first"
            )
        try:
            return kinds[name](**settings)
        except TypeError as error:
            raise ValueError(f"configuration {config!r}: {error}") from None

    def told_among(self, ranks: int) -> dict[str, Any]:
        """Return what ranks compare: the settings, and which ranks sum, where not all do."""
        try:
            owners: Any = [int(owner) for owner in self.of_bucket(0, ranks).owners(ranks)]
        except Exception as error:
            # told to all ranks, who have to compare before one of them raises it
            owners = repr(error)
        return self.get_config() if owners == [*range(ranks)] else {**self.get_config(), "sums_on": owners}

    def owners(self, ranks: int) -> Sequence[int]:
        """Return the positions, in ascending order, of the ranks that sum; each gets an equal share of the elements.

        Raises:
            UnsupportedError: the exchange cannot work among this number of ranks.
        """
        return range(ranks)

    def answers_of(self, compressor: Compressor) -> Compressor:
        """Return the compressor that encodes the sum of gradients that `compressor` has encoded."""
        return compressor

    @property
    def inside_compressor(self) -> Compressor | None:
        """The compressor inside of hosts; None if nothing is compressed there."""
        return None

    def inside_of(self, compressor: Compressor) -> Compressor | None:
        """Return the compressor inside of hosts where `compressor` works between them; None if there is none."""
        if self.inside_compressor is None:
            return None
        # what is not rounded between hosts is not rounded inside of them
        return compressor if compressor.reducible else checked(self.inside_compressor)

    def check_votes(self, compressor: Compressor, answers: Sequence[Compressor] | None = None) -> None:
        """Raise UnsupportedError if a compressor needs a majority vote, and no owner here decides it."""
        answers = [self.answers_of(compressor)] if answers is None else answers
        if compressor.votes and not (self.has_owners and all(answer.votes for answer in answers)):
            raise UnsupportedError(
                f"{compressor!r} with {self!r}: a sum of signs is no sign, and here no owner of the sum decides the "
                "vote. Use exchange='two_phase', 'hierarchical', 'auto', or 'parameter_server' with answer='compressed'"
            )

    def of_bucket(self, number: int, ranks: int) -> Exchange:
        """Return the exchange of one bucket of an optimizer."""
        return self

    def with_owners(self) -> Exchange:
        """Return the exchange to use where sums must have owners: this one, or one of its candidates."""
        return self

    def pays(self, plan: Plan, itemsize: int) -> bool:
        """Tell whether a planned exchange pays for a tensor alone, with elements of `itemsize` bytes.

        It does not where it would send as many bytes as an allreduce.
        """
        return self.takes_all or saves_bytes(plan, itemsize)

    def alone(self, compressor: Compressor, shape: tuple[int, ...], ranks: int, itemsize: int) -> Plan:
        """Plan the exchange of a tensor that goes alone."""
        return self._plan(compressor, shape, ranks)

    def together(self, tensors: Mapping[str, tuple[tuple[int, ...], Compressor]], ranks: int) -> dict[str, Plan]:
        """Plan the exchange that tensors, {name: (shape, compressor)}, share."""
        plans: dict[str, Plan] = {}
        for kind in dict.fromkeys(compressor for _, compressor in tensors.values()):
            alike = {name: shape for name, (shape, compressor) in tensors.items() if compressor == kind}
            if not self.has_owners or len(alike) == 1:
                plans |= {name: self._plan(kind, shape, ranks) for name, shape in alike.items()}
                continue
            owners = len(self.checked_owners(ranks))
            ends = list(accumulate((math.prod(shape) for shape in alike.values()), initial=0))
            for (name, shape), start in zip(alike.items(), ends, strict=False):
                cuts = cuts_within(start, math.prod(shape), ends[-1], owners, kind.group_of(shape))
                plans[name] = self._plan(kind, shape, ranks, cuts)
        return {name: plans[name] for name in tensors}

    def checked_owners(self, ranks: int) -> list[int]:
        """Return `owners`, after a check.

        Raises:
            ContractError: they are none, or fit neither the ranks nor the collectives.
            UnsupportedError: see `owners`.
        """
        owners = list(self.owners(ranks))
        if not owners or owners != sorted({*owners} & {*range(ranks)}):
            raise ContractError(
                f"{self!r}: owners({ranks}) returned {owners}; it has to return some of the positions from 0 to "
                f"{ranks - 1}, in ascending order"
            )
        if self.uses_hosts and len(owners) < ranks:
            raise ContractError(
                f"{self!r}: owners({ranks}) returned {owners}; between hosts every rank owns a share. Derive from "
                "TwoPhase to choose others"
            )
        if self._has_root and len(owners) > 1:
            raise ContractError(f"{self!r}: owners({ranks}) returned {owners}; only one rank can broadcast the sums")
        return owners

    @property
    def _has_root(self) -> bool:
        """Whether one rank broadcasts all sums."""
        return self.collectives[-1:] == ("broadcast",)

    def _plan(
        self, compressor: Compressor, shape: tuple[int, ...], ranks: int, cuts: tuple[int, ...] | None = None
    ) -> Plan:
        """Plan the exchange of a tensor, of which each owner gets what lies between two cuts."""
        numel, group = math.prod(shape), compressor.group_of(shape)
        owners = self.checked_owners(ranks) if self.has_owners else [0]
        cuts = chunk_bounds(numel, len(owners), group) if cuts is None else cuts
        chunks = range(ranks) if self.has_owners else owners
        bounds = (*(cuts[bisect_left(owners, chunk)] for chunk in chunks), numel)
        sizes = [b - a for a, b in pairwise(bounds)]
        parts = tuple(compressor.for_part(n, numel) if n else compressor for n in sizes)
        answers = tuple(self.answers_of(part.for_sum(ranks)) for part in parts)
        self.check_votes(compressor, answers)
        # a tensor without elements still has a payload for each owner, so that its exchange is not empty
        has_payload = [n > 0 or (numel == 0 and chunk in owners) for chunk, n in zip(chunks, sizes, strict=True)]

        def slots(of: Sequence[Compressor]) -> tuple[int, ...]:
            return tuple(c.capacity(n, group) if has else 0 for c, n, has in zip(of, sizes, has_payload, strict=True))

        root = owners[0] if self._has_root else None
        return Plan(self, shape, ranks, group, bounds, parts, slots(parts), answers, slots(answers), root)


def _with_heirs(kind: type[Exchange]) -> list[type[Exchange]]:
    return [kind, *(heir for below in kind.__subclasses__() for heir in _with_heirs(below))]


@dataclass(frozen=True)
class TwoPhase(Exchange):
    """Each rank owns an equal share of the elements: it sums what all have sent of these, and encodes the sum again.

    Where tensors share an exchange, each rank owns an equally long run of all elements that share a compressor. So it
    decodes and encodes a few long chunks instead of a short one of every tensor.

    Source: Dryden et al. 2016, section 3.4.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import OneBit, TwoPhase
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(4, OneBit(), exchange=TwoPhase())
        >>> ranks.allreduce([np.full(64, rank, np.float32) for rank in range(4)], name="w")[0][0]
        np.float32(1.5)
        >>> ranks.bounds("w")
        (0, 16, 32, 48, 64)
    """

    id = "two_phase"
    collectives = ("alltoall", "allgather")


@dataclass(frozen=True)
class AllGather(Exchange):
    """Every rank gets what all have encoded, and sums it up: one collective, whose bytes grow with the number of ranks.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import AllGather, OneBit
        >>> from hvd_compress.loopback import Loopback
        >>> ranks = Loopback(2, OneBit(), exchange=AllGather())
        >>> ranks.allreduce([np.full(64, rank, np.float32) for rank in range(2)], name="w")[0][0]
        np.float32(0.5)
    """

    id = "allgather"
    collectives = ("allgather",)
    has_owners = False


@dataclass(frozen=True)
class Hierarchical(Exchange):
    """Ranks of a host sum their gradients; what travels between hosts is compressed, in two phases.

    All hosts need equally many ranks. Ranks are on one host if they report the same host name.

    The optimizer's `compression=` is for the links between hosts. Inside of a host gradients travel uncompressed, or
    compressed by `inside`, which is usually wider: 8 bits inside, 4 between. A rank sends the other ranks of its host
    their shares, and adds its own share uncompressed. What `inside` leaves out is kept and added to the next gradient;
    that takes 4 bytes for each element on each rank. The sums of all hosts are passed on inside of a host in the form
    in which they came. Small tensors go uncompressed everywhere.

    Source: Wang et al. 2023 (ZeRO++), section 3.3, and Jia et al. 2024 (SDP4Bit), which has two widths. In these papers
    gradients of sharded parameters are scattered; here sums come back to all ranks, and both levels have error
    feedback.

    Args:
        inside: a compressor, or its name, such as Blockwise(bits=8); None for uncompressed gradients.

    Raises:
        TypeError: `inside` is no compressor.
        ValueError: `inside` is a name or a configuration that no compressor has.
        UnsupportedError: a compressor that cannot work inside of a host.

    Example:
        >>> import numpy as np
        >>> from hvd_compress import Blockwise, Hierarchical
        >>> from hvd_compress.loopback import Loopback
        >>> ones = [np.ones(64 * 512, np.float32)] * 4
        >>> for exchange in (Hierarchical(), Hierarchical(inside=Blockwise(bits=8))):
        ...     ranks = Loopback(4, Blockwise(bits=4), exchange, ranks_per_host=2)
        ...     print(ranks.allreduce(ones, name="w")[0].sum(), ranks.bytes_sent[0] / ones[0].size)
        32768.0 2.5205078125
        32768.0 1.029541015625
    """

    id = "hierarchical"
    collectives = ("scatter_inside", "alltoall", "gather_between", "gather_inside")
    uses_hosts = True

    inside: Compressor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "inside", checked_inside(self.inside))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "inside": None if self.inside is None else self.inside.get_config()}

    @property
    def inside_compressor(self) -> Compressor | None:
        return self.inside


@dataclass(frozen=True)
class Dense(Exchange):
    """Horovod's own allreduce, for tensors for which an exchange does not pay."""

    id = "dense"
    collectives = ()


@dataclass(frozen=True)
class FewestBytes(Exchange):
    """Chooses, for the tensors of each bucket, the one of two exchanges that sends fewer bytes.

    Each collective counts as 32 KiB more. A tensor alone goes uncompressed where neither exchange sends fewer bytes
    than a ring allreduce of the gradient.
    """

    id = "auto"
    collectives = ()
    candidates: ClassVar[tuple[Exchange, ...]] = (AllGather(), TwoPhase())

    def check_votes(self, compressor: Compressor, answers: Sequence[Compressor] | None = None) -> None:
        """Do nothing: `candidates_for` leaves out exchanges in which nobody decides a vote."""

    def candidates_for(self, compressors: Sequence[Compressor]) -> list[Exchange]:
        """Return the exchanges to choose from: only those with owners if a compressor needs a majority vote."""
        votes = any(compressor.votes for compressor in compressors)
        return [exchange for exchange in self.candidates if exchange.has_owners or not votes]

    def with_owners(self) -> Exchange:
        return next(exchange for exchange in self.candidates if exchange.has_owners)

    def pays(self, plan: Plan, itemsize: int) -> bool:
        # told by the plan, which counts what a collective costs, too
        return not isinstance(plan.exchange, Dense)

    def alone(self, compressor: Compressor, shape: tuple[int, ...], ranks: int, itemsize: int) -> Plan:
        candidates = self.candidates_for([compressor])
        plans = [[exchange.alone(compressor, shape, ranks, itemsize)] for exchange in candidates]
        # collectives are left out here: in a bucket the tensor shares them with others
        if ranks > 1 and min(map(sent_bytes, plans)) >= ring_bytes(itemsize * math.prod(shape), ranks):
            return Plan(Dense(), shape, ranks, 1, (0, math.prod(shape)), (), (), (), ())
        (best,) = min(plans, key=_priced)
        return best

    def together(self, tensors: Mapping[str, tuple[tuple[int, ...], Compressor]], ranks: int) -> dict[str, Plan]:
        candidates = self.candidates_for([compressor for _, compressor in tensors.values()])
        plans = [exchange.together(tensors, ranks) for exchange in candidates]
        return min(plans, key=lambda of_exchange: _priced(list(of_exchange.values())))


def _priced(plans: Sequence[Plan]) -> float:
    """Compute the cost of an exchange of the tensors of `plans`, in bytes."""
    return sent_bytes(plans) + COLLECTIVE_BYTES * len(plans[0].collectives)
