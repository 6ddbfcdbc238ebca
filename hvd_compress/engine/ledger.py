"""Keep the books of an optimizer or tape on one rank: which tensors are compressed, residuals, costs, saved state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hvd_compress import saved
from hvd_compress.compressors import Compressor, PowerSGD
from hvd_compress.engine.accumulators import Accumulators, refuse_accumulators
from hvd_compress.engine.routing import Routing, Tensor
from hvd_compress.engine.states import fitted_entries
from hvd_compress.errors import StateError, UnsupportedError
from hvd_compress.exchange import (
    Account,
    Accumulator,
    AdaGrad,
    Counters,
    Hosts,
    Pack,
    Plan,
    account_of,
    plan_together,
)
from hvd_compress.feedback import FORMAT, check_state
from hvd_compress.memory import HOST, Memory

__all__ = ["Ledger"]

Array = npt.NDArray[Any]


class _Bucket(Protocol):
    """What a ledger asks of the buckets of an edge."""

    tensors: list[str]

    def settle_counts(self) -> None:
        """Bring the counters of the tensors up to date."""

    def abandon(self) -> None:
        """Forget a step in flight and make residuals what they were before it."""


AnyBucket = TypeVar("AnyBucket", bound=_Bucket)
MakeBucket = Callable[[dict[str, Account], Pack | None], AnyBucket]


def _handled_in(tensor: Tensor) -> npt.DTypeLike:
    return np.float64 if tensor.dtype == "float64" else np.float32


class Ledger(Generic[AnyBucket]):
    """Holds the buckets of the tensors that are exchanged and the counters of the others.

    Small float32 tensors travel in the buckets of the compressed ones, uncompressed; where nothing is compressed, and
    with `bucket_bytes=0`, they go dense.

    Args:
        routing: which way tensors go.
        ranks: that take part.
        position: of this rank among them.
        tensors: all that may come, in the order of the forward pass.
        make_bucket: from accounts and pack.
        groups: of names, to go together.
        pays_debts: whether the edge adds what is `due` to gradients that go dense.
        hosts: of the ranks; a hierarchical exchange needs them.
        adagrad: makes all combined gradients updates: those that are compressed in the exchange, small ones beside
            them where they arrive, and dense ones where the edge calls `precondition`.
        scale: factor on the sum over ranks, of which AdaGrad must know.
        resting: tensors that take no gradients now, and may do so again: what is owed of them is kept.
        memory_of: the memory that the gradients of tensors, given by name, that go together come from.
    """

    def __init__(
        self,
        routing: Routing,
        ranks: int,
        position: int,
        tensors: Iterable[Tensor],
        make_bucket: MakeBucket[AnyBucket],
        groups: list[list[str]] | None = None,
        pays_debts: bool = False,
        hosts: Hosts | None = None,
        adagrad: AdaGrad | None = None,
        scale: float = 1.0,
        resting: Iterable[Tensor] = (),
        memory_of: Callable[[Sequence[str]], Memory] = lambda names: HOST,
    ) -> None:
        self.routing = routing
        self._memory_of = memory_of
        self.buckets: list[AnyBucket] = []
        self.accounts: dict[str, Account] = {}
        self.packs: dict[str, Pack] = {}
        """The pack of each small tensor."""
        self.dense: dict[str, Counters] = {}
        self._pays_debts = pays_debts
        self._hosts = hosts if routing.exchange.uses_hosts else None
        self.debts: dict[str, Array] = {}
        """What is owed of tensors that go dense now; it travels with their next gradient."""
        self._paid: set[str] = set()
        """Those whose debts travel in this step."""
        self._late_updates: dict[str, Array] = {}
        """With AdaGrad, what owners owe of tensors that go dense now: updates, of no scale, which wait for owners."""
        self._before: dict[str, Counters] = {}
        self._resting: dict[str, Counters] = {}
        """The counters of the tensors that take no gradients now."""
        self._bucket_of: dict[str, AnyBucket] = {}
        self._steps = 0
        """Of the training, which randomness depends on; a state brings those of before."""
        self._counted_steps = 0
        """Those that this process has made, as all counters count."""
        self._loss_scale = 1.0
        self._ranks = ranks
        self._position = position
        by_name = {tensor.name: tensor for tensor in tensors}
        self._shapes = {tensor.name: tensor.shape for tensor in by_name.values()}
        # gradients are handled in these types, and residuals have them too
        self._dtypes = {tensor.name: _handled_in(tensor) for tensor in by_name.values()}
        self.accumulators = (
            None if adagrad is None else Accumulators(adagrad, scale, self._shapes, self.accounts, self.packs)
        )
        for tensor in resting:
            self._shapes[tensor.name] = tensor.shape
            self._dtypes[tensor.name] = _handled_in(tensor)
            self._resting[tensor.name] = Counters()
        if ranks > 1:
            # asked for its checks, whether a tensor goes there or not
            routing.exchange.of_bucket(0, ranks).checked_owners(ranks)
        for names in routing.divided(by_name.values(), ranks, groups):
            bucket = self._make_bucket(names, by_name, routing, make_bucket)
            self.buckets.append(bucket)
            self._bucket_of.update(dict.fromkeys(bucket.tensors, bucket))
        self.dense = {name: Counters() for name in by_name if name not in self._bucket_of}

    def _make_bucket(
        self, names: list[str], tensors: dict[str, Tensor], routing: Routing, make_bucket: MakeBucket[AnyBucket]
    ) -> AnyBucket:
        compressed = [tensors[name] for name in names if routing.compresses(tensors[name], self._ranks)]
        small = {name: tensors[name].shape for name in names if tensors[name] not in compressed}
        chosen = {t.name: routing.payloads_of(t) for t in compressed}
        together = {t.name: (t.shape, chosen[t.name]) for t in compressed}
        packed_as = f"{compressed[0].name} and small"
        if small:
            together[packed_as] = (Pack.shape_of(small), Pack.compressor)
        # buckets of a choice and buckets of what is left to compress are not the same where some went dense
        ways = {routing.exchange_of(t.name) for t in compressed}
        exchange = ways.pop() if len(ways) == 1 else routing.exchange
        plans = plan_together(exchange.of_bucket(len(self.buckets), self._ranks), together, self._ranks)
        memory = self._memory_for(names, plans)
        accounts = {
            t.name: account_of(
                t.name, plans[t.name], chosen[t.name], self._position, self._hosts, t.itemsize,
                self._accumulator(), memory,
            )
            for t in compressed
        }  # fmt: skip
        pack = None
        if small:
            pack = Pack(packed_as, small, plans[packed_as], self._position, self._hosts, self._accumulator(), memory)
        self.accounts.update(accounts)
        self.packs.update(dict.fromkeys(small, pack) if pack is not None else {})
        return make_bucket(accounts, pack)

    def _memory_for(self, names: Sequence[str], plans: Mapping[str, Plan]) -> Memory:
        """Return where these tensors are exchanged: through the host where the other memory lacks what is wanted."""
        memory = self._memory_of(names)
        if memory.is_host or self.accumulators is not None or self._hosts is not None:
            return HOST
        if any(c.has_narrow_residuals for p in plans.values() for c in p.chunk_compressors):
            return HOST
        used = {(c, p.group) for p in plans.values() for c in (*p.chunk_compressors, *p.answer_compressors)}
        return HOST if any(compressor.device_kernels(group) is None for compressor, group in used) else memory

    def _accumulator(self) -> Accumulator | None:
        return None if self.accumulators is None else self.accumulators.of_sums()

    @property
    def steps(self) -> int:
        """The steps of the training so far, with those of a loaded state."""
        return self._steps

    @property
    def is_used(self) -> bool:
        """Whether any tensor goes through one of our exchanges."""
        return bool(self.buckets)

    @property
    def owes(self) -> bool:
        """Whether this rank may owe anything, or keeps anything else that depends on all steps before."""
        return bool(self.buckets) or bool(self.debts) or self.accumulators is not None

    @property
    def may_owe(self) -> bool:
        """Whether anything may be owed: not where all compressors are without error feedback."""
        return any(a.may_owe for a in self.accounts.values()) or bool(self.debts) or self.accumulators is not None

    @property
    def only_way(self) -> Compressor | None:
        """The compressor of all tensors if all go dense in the same way and nothing is owed; else None."""
        if self.owes:
            return None
        ways = {self.routing.compressor_of(name) for name in self._shapes if name not in self._resting}
        return ways.pop() if len(ways) == 1 else None

    def exchanges(self, name: str) -> bool:
        """Tell whether the tensor goes through one of our exchanges rather than Horovod's allreduce."""
        return name in self._bucket_of

    def bucket_of(self, name: str) -> AnyBucket:
        """Return the bucket of a tensor that is exchanged."""
        return self._bucket_of[name]

    def abandon(self) -> None:
        """Forget a step in flight and make residuals what they were before it."""
        self._paid = set()
        for bucket in self.buckets:
            bucket.abandon()

    def inherit(self, other: Ledger[AnyBucket]) -> None:
        """Take over what `other`, a ledger of the same tensors with another routing, still owes, and its counters.

        Raises:
            UnsupportedError: something is owed of a tensor that is not compressed with error feedback here, and no
                debts are paid.
        """
        for name, account in other.accounts.items():
            if name in self.accounts and self.accounts[name].may_owe:
                continue
            is_kept = self._pays_debts or name in self._resting
            if account.is_owing() and not is_kept:
                raise self._unpaid(name, account.residual_norm())
            if account.is_owing() and is_kept:
                owed = account.all_owed()
                self._owe(name, owed.dtype)[:] = owed
        for name, debt in other.debts.items():
            if name in self.accounts and not self.accounts[name].may_owe:
                raise self._unpaid(name, float(np.linalg.norm(debt)))
            if name in self.accounts:
                self.accounts[name].take_owed(0, debt)
            else:
                self.debts[name] = debt
        for name, account in self.accounts.items():
            if name in other.accounts:
                account.inherit(other.accounts[name])
            else:
                # the randomness of its first steps has been used
                account.step = other._steps
        self._late_updates = {n: update for n, update in other._late_updates.items() if n not in self.accounts}
        self.inherit_counters(other)
        self._steps = other._steps
        self._loss_scale = other._loss_scale

    def inherit_counters(self, other: Ledger[Any]) -> None:
        """Take over what `other`, a ledger of the same tensors, has counted."""
        for name, account in self.accounts.items():
            account.counters = other.counters_of(name)
        # a pack's counters stand for all its members: what these have cost before is kept beside them
        self._before = {name: other.counters_of(name) for name in self.packs}
        for counters in (self.dense, self._resting):
            counters.update((name, other.counters_of(name)) for name in counters)
        self._counted_steps = other._counted_steps

    def set_loss_scale(self, loss_scale: float) -> None:
        """Convert the residuals, which are in units of the scaled gradients, to another loss scale."""
        factor = loss_scale / self._loss_scale
        self._loss_scale = loss_scale
        if factor != 1.0:
            for account in self.accounts.values():
                account.rescale(factor)
            for debt in self.debts.values():
                debt *= factor
        if self.accumulators is not None:
            self.accumulators.set_loss_scale(loss_scale)

    # -- AdaGrad -------------------------------------------------------------------------------------------------

    def precondition(self, name: str, combined: Array) -> bool:
        """With AdaGrad, turn a flat combined gradient that went dense into an update; returns whether it is finite.

        It works in place, and alike on all ranks. Nothing is final before `settle`.
        """
        return self.accumulators is None or self.accumulators.precondition(name, combined, self._loss_scale)

    def due(self, name: str) -> Array | None:
        """What is owed of a tensor that goes dense, flat, to be added to its gradient now; `settle` decides."""
        if name in self.debts:
            self._paid.add(name)
        return self.debts.get(name)

    def settle(self, keep: bool) -> None:
        """End the step: debts that travelled are forgotten.

        Without `keep` they stay, and the accumulators of dense tensors are what they were before the step.
        """
        if self.accumulators is not None:
            self.accumulators.settle(keep)
        for name in self._paid if keep else ():
            self.debts.pop(name, None)
        self._paid = set()

    # -- statistics ----------------------------------------------------------------------------------------------

    def count_step(self, times: int = 1) -> None:
        """Count one or more complete steps."""
        self._steps += times
        self._counted_steps += times

    def count_dense(self, name: str, sent_bytes: int, gradient_bytes: int, times: int = 1) -> None:
        """Count uncompressed allreduces of `sent_bytes` that stand for a gradient of `gradient_bytes`."""
        if name not in self.dense:
            self.dense[name] = Counters()
        self.dense[name].count_dense(sent_bytes, gradient_bytes, self._ranks, times)

    def stats(self) -> dict[str, Any]:
        """Return "total" and "tensors" of `compression_stats()`: what this process has done, whatever it has loaded."""
        total = Counters(steps=self._counted_steps)
        squares = 0.0
        tensors = {}
        for name, account in self.accounts.items():
            norm = account.residual_norm()
            squares += norm**2
            tensors[name] = self.counters_of(name).report(norm) | {"exchange": account.plan.exchange.id}
        for name in (*self.packs, *self.dense):
            norm = float(np.linalg.norm(self.debts[name])) if name in self.debts else 0.0
            squares += norm**2
            way = f"{self.packs[name].account.plan.exchange.id}, uncompressed" if name in self.packs else "dense"
            tensors[name] = self.counters_of(name).report(norm) | {"exchange": way}
        for name, counters in self._resting.items():
            if counters.steps or name in self.debts:
                norm = float(np.linalg.norm(self.debts[name])) if name in self.debts else 0.0
                squares += norm**2
                tensors[name] = counters.report(norm) | {"exchange": "none, takes no gradients"}
        for name in tensors:
            total.add(self.counters_of(name))
        return {"total": total.report(squares**0.5), "tensors": tensors}

    def counters_of(self, name: str) -> Counters:
        """Return the counters of a tensor; for a small one, its share of its pack's counters."""
        if name in self._bucket_of:
            self._bucket_of[name].settle_counts()
        if name in self.accounts:
            return self.accounts[name].counters
        if name not in self.packs:
            return self.dense.get(name) or self._resting.get(name) or Counters()
        counters = self.packs[name].account.counters.scaled(self.packs[name].share(name))
        if name in self._before:
            steps = counters.steps + self._before[name].steps
            counters.add(self._before[name])
            counters.steps = steps
        return counters

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `hvd_compress.feedback` describes; its values are copied NumPy arrays."""
        residuals, owners = {}, {}
        for name, account in self.accounts.items():
            shape = list(account.plan.shape)
            if account.residual is not None or account.pending is not None:
                residuals[name] = {"shape": shape, "values": account.whole_residual().copy()}
            if account.owner_residual is not None and account.owned is not None:
                values = account.memory.to_host(account.owner_residual).copy()
                owners[name] = {"shape": shape, "start": account.owned.start, "values": values}
        for name, debt in self.debts.items():
            residuals[name] = {"shape": list(self._shapes[name]), "values": debt.copy()}
        for name, update in self._late_updates.items():
            owners[name] = {"shape": list(self._shapes[name]), "start": 0, "values": update.copy()}
        return {
            "format": FORMAT,
            "size": self._ranks,
            "rank": self._position,
            "steps": self._steps,
            "loss_scale": self._loss_scale,
            "transfer_steps": {name: account.step for name, account in self.accounts.items()},
            "compressor": None if self.routing.compressor is None else self.routing.compressor.get_config(),
            "residuals": residuals,
            "owner_residuals": owners,
            **self._factors(),
            **({} if self.accumulators is None else {"accumulators": self.accumulators.entries()}),
        }

    def _factors(self) -> dict[str, Any]:
        """Return what the next step begins with where factors are summed; the same on all ranks."""
        kept = {name: account.factor for name, account in self.accounts.items() if account.factor is not None}
        if not kept:
            return {}
        return {"factors": {n: {"shape": list(q.shape), "values": q.reshape(-1).copy()} for n, q in kept.items()}}

    def _checked_factors(self, state: dict[str, Any]) -> dict[str, Array]:
        """The factors of a state that serve here; a tensor without, or of another rank than now, begins anew.

        Raises:
            StateError: values are too large for float32.
        """
        found = {}
        for name, entry in state.get("factors", {}).items():
            account = self.accounts.get(name)
            chunks = [] if account is None else account.plan.chunk_compressors
            if account is None or not chunks or not isinstance(chunks[0], PowerSGD):
                continue
            _, columns, rank = chunks[0].matrix_of(account.plan.shape)
            if entry["shape"] == [rank, columns]:
                values = saved.floats(f"factor of {name!r}", entry["values"], dtype=np.float32)
                found[name] = values.reshape(rank, columns).copy()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check a state completely, then take it over.

        Counters go on as they are.

        Raises:
            StateError: not a compressor state, of another number of ranks or another rank, or of other tensors.
        """
        state = check_state(state)
        if state["size"] != self._ranks:
            raise StateError(
                f"this compressor state is of {state['size']} ranks, and there are {self._ranks} now: collect the "
                f"states of all ranks, and divide them with hvd_compress.feedback.redistribute(states, {self._ranks}), "
                "with average=True where gradients are averaged"
            )
        if state["rank"] != self._position and (self.is_used or self._pays_debts):
            raise StateError(
                f"this compressor state is of rank {state['rank']}, and this is rank {self._position}: save a state on "
                "each rank, and load it on the same rank"
            )
        for kind in ("residuals", "owner_residuals"):
            for name, entry in state[kind].items():
                self._check_entry(name, entry)
        if self.accumulators is None:
            refuse_accumulators(state)
        else:
            self.accumulators.check(state)
        state = fitted_entries(state, self._dtypes)
        # a state saved before AdaGrad was switched on gives residuals in units of the sum, and accumulators begin anew
        owned: dict[str, Array] = {}
        accumulated: dict[str, Array] = {}
        if self.accumulators is not None and "accumulators" in state:
            accumulated = self.accumulators.needed(state, "accumulators")
            owned = self.accumulators.needed(state, "owner_residuals")
            self._check_updates(owned)
        factors = self._checked_factors(state)
        self.abandon()
        for name, account in self.accounts.items():
            own, owed = state["residuals"].get(name), state["owner_residuals"].get(name)
            account.residual = account.pending = account.owner_residual = None
            if own is not None:
                account.take_residual(own["values"].copy())
            if "accumulators" in state:
                values = owned.get(name)
                account.owner_residual = None if values is None else account.memory.from_host(values)
            elif owed is not None:
                account.take_owed(owed["start"], owed["values"].copy())
            account.step = state.get("transfer_steps", {}).get(name, state["steps"])
            account.factor = factors.get(name)
        self.debts = {}
        self._late_updates = {name: values for name, values in owned.items() if name not in self.accounts}
        for kind in ("residuals",) if "accumulators" in state else ("residuals", "owner_residuals"):
            for name, entry in state[kind].items():
                if name not in self.accounts:
                    start, values = entry.get("start", 0), entry["values"]
                    self._owe(name, values.dtype)[start : start + values.size] += values
        self._steps = state["steps"]
        self._loss_scale = state.get("loss_scale", 1.0)
        if self.accumulators is not None:
            self.accumulators.take(accumulated)
            self.accumulators.set_loss_scale(self._loss_scale)

    def go_back_to(self, state: dict[str, Any]) -> None:
        """Owe what `state_dict` returned before exchanges whose results nobody uses.

        Numbers of steps, which randomness depends on, and factors stay: those are the same on all ranks.
        """
        steps, of_accounts = self._steps, {name: (a.step, a.factor) for name, a in self.accounts.items()}
        self.load_state_dict(state)
        self._steps = steps
        for name, account in self.accounts.items():
            account.step, account.factor = of_accounts[name]

    def _unpaid(self, name: str, norm: float) -> UnsupportedError:
        return UnsupportedError(
            f"{self.routing.compressor_of(name)!r} keeps no residual of {name!r}, of which {norm:.3g} is still owed: "
            "take a compressor with error feedback, such as the last one"
        )

    def _check_updates(self, owned: Mapping[str, Array]) -> None:
        """Raise StateError if owners owe updates of what they send whole now."""
        for name, values in owned.items():
            account = self.accounts.get(name)
            if account is not None and not account.owner_keeps_residual and values.any():
                raise StateError(
                    f"compressor state has updates that an owner still owes of {name!r}, and {account.plan.exchange!r} "
                    "sends them uncompressed, so that nothing is ever owed. Load it with the exchange that it was "
                    "saved with"
                )

    def _owe(self, name: str, dtype: npt.DTypeLike) -> Array:
        return self.debts.setdefault(name, np.zeros(math.prod(self._shapes[name]), dtype))

    def _check_entry(self, name: str, entry: dict[str, Any]) -> None:
        account = self.accounts.get(name)
        is_paid = (self._pays_debts and name in self._shapes) or name in self._resting
        if account is None and not is_paid:
            raise StateError(
                f"compressor state has a residual of {name!r}, which is not compressed here. Load it with the "
                "parameters and the settings that it was saved with; compressed here are "
                f"{', '.join(map(repr, self.accounts)) or 'none'}"
            )
        if tuple(entry["shape"]) != self._shapes[name]:
            raise StateError(
                f"residual of {name!r} has shape {tuple(entry['shape'])}, and the tensor has {self._shapes[name]}"
            )
        if account is not None and not account.may_owe:
            raise StateError(
                f"compressor state has a residual of {name!r}, and {self.routing.compressor_of(name)!r} keeps none. "
                "Load it with the compression that it was saved with"
            )
