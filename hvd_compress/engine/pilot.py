"""Run `Auto`: choose a way for each bucket from measured links and kernels, corrected by the steps' real times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvd_compress.compressors import FP16, Compressor, NoCompression
from hvd_compress.cost import Explorer, Network, Speed, Stage, configurations, stages_of
from hvd_compress.engine.estimate import bucket_work
from hvd_compress.engine.routing import Routing, Tensor, backward_buckets
from hvd_compress.exchange import Dense, Exchange, FewestBytes, TwoPhase
from hvd_compress.policy import Assigned, Auto

__all__ = ["Pilot", "timed_compressors"]

_DENSE, _HALF = "none", "fp16"
# how many steps' seconds the ranks compare at once, while they try and when they have chosen
_TRIAL_STEPS, _WATCHED_STEPS = 9, 20
_SKIPPED_STEPS = 2
# short steps are compared in larger numbers, so that the collective that compares them is not felt
_TRIAL_SECONDS, _WATCHED_SECONDS = 0.2, 1.0
_MOST_WATCHED_STEPS = 500
# share of the time that turns of other ways may cost after one was chosen
_RIVALS_SHARE = 0.005
# predictions are not exact: another exchange than that of "auto" must gain so much by them
_EXCHANGE_GAIN = 1.1


def timed_compressors(auto: Auto, exchange: Exchange) -> list[Compressor]:
    """Return the compressors whose speeds matter: FP16, the candidates, and what works inside of hosts."""
    inside = exchange.inside_compressor
    return list(dict.fromkeys([FP16(), *auto.candidates, *([] if inside is None else [inside])]))


class Pilot:
    """Decides which way tensors go in the next step.

    Ranks that are given equal arguments and equal seconds decide alike.

    Args:
        auto: what the user asked for.
        tensors: all that may come, in the order of the forward pass.
        routing: exchange and sizes; its compressor is not looked at.
        network: as measured, equal on all ranks.
        speeds: of the compressors that `timed_compressors` returns, equal on all ranks.
    """

    def __init__(
        self,
        auto: Auto,
        tensors: Sequence[Tensor],
        routing: Routing,
        network: Network,
        speeds: Mapping[Compressor, Speed],
    ) -> None:
        self._routing = routing
        self._network = network
        self._speeds = speeds
        ids = [c.id for c in auto.candidates]
        self._ways: dict[str, Compressor] = {_DENSE: NoCompression(), _HALF: FP16()}
        self._ways |= {c.id if ids.count(c.id) == 1 else repr(c): c for c in auto.candidates}
        self._tensors = {t.name: t for t in tensors}
        shapes = {t.name: t.shape for t in tensors if math.prod(t.shape)}
        self.buckets = backward_buckets(shapes, routing.bucket_bytes)
        found = [self._stages(names) for names in self.buckets]
        stages, self._exchanges = [of_way for of_way, _ in found], [exchanges for _, exchanges in found]
        self._predicted = [{way: _seconds(of_way) for way, of_way in b.items()} for b in stages]
        self.explorer = Explorer(
            configurations(stages, _DENSE),
            _DENSE,
            skip=_SKIPPED_STEPS,
            steps=_TRIAL_STEPS,
            seconds=_TRIAL_SECONDS,
            share=_RIVALS_SHARE,
        )

    def routing(self) -> Routing:
        """The way that tensors go from now on."""
        chosen: dict[str, Compressor] = {}
        exchanges: dict[str, Exchange] = {}
        for names, label, by_way in zip(self.buckets, self.explorer.current.labels, self._exchanges, strict=True):
            chosen |= dict.fromkeys(names, self._ways[label])
            if label in by_way:
                exchanges |= dict.fromkeys(names, by_way[label])
        return replace(self._routing, compressor=Assigned(chosen, exchanges))

    @property
    def seconds_wanted(self) -> int:
        """The number of steps to time before the ranks compare."""
        if self.explorer.trying:
            # more would be steps of a slow way that nobody looks at
            return self.explorer.missing
        lasting = math.ceil(_WATCHED_SECONDS / self.explorer.expected) if self.explorer.expected else 0
        return min(max(lasting, _WATCHED_STEPS), _MOST_WATCHED_STEPS)

    @property
    def trying(self) -> bool:
        """Whether the next steps are to find out how fast a way is."""
        return self.explorer.trying

    @property
    def chosen(self) -> str | None:
        """The name of the way that is thought to be the fastest; None while the search goes on."""
        return self.explorer.chosen.name if self.explorer.committed else None

    @property
    def rival(self) -> str | None:
        """The name of the way that the next steps compare with the chosen one; None if there is none."""
        return self.explorer.rival

    def observe(self, seconds: Sequence[float]) -> bool:
        """Take the seconds of steps, equal on all ranks; returns whether `routing` is another one now."""
        # seconds left after a change belong to the old routing
        return any(self.explorer.observe(s) for s in seconds)

    def report(self) -> dict[str, Any]:
        """Say what was chosen and why, for `compression_stats()`."""
        chosen = self.explorer.chosen
        return {
            "configuration": chosen.name,
            "committed": self.explorer.committed,
            "rival": self.explorer.rival,
            "predicted_seconds": {c.name: c.seconds for c in self.explorer.configurations},
            "measured_seconds": self.explorer.measured,
            "buckets": [
                {
                    "tensors": list(names),
                    "choice": label,
                    "exchange": (
                        Dense() if self._ways[label].reducible else by_way.get(label, self._routing.exchange)
                    ).id,
                    "predicted_seconds": predicted,
                }
                for names, label, by_way, predicted in zip(
                    self.buckets, chosen.labels, self._exchanges, self._predicted, strict=True
                )
            ],
            "link": self._network.link.get_config(),
            "reason": self._reason(),
        }

    def _reason(self) -> str:
        chosen, measured = self.explorer.chosen, self.explorer.measured
        known = measured if self.explorer.committed and chosen.name in measured else None
        seconds = known or {c.name: c.seconds for c in self.explorer.configurations}
        others = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in sorted(seconds.items(), key=lambda item: item[1]))
        return f"{chosen.name}: {'measured' if known else 'predicted'} per step: {others}"

    def _stages(self, names: Sequence[str]) -> tuple[dict[str, tuple[Stage, ...]], dict[str, Exchange]]:
        """List the stages of each way to exchange a bucket's tensors, and the exchange where predictions chose it."""
        tensors = [self._tensors[name] for name in names]
        exchange = self._routing.exchange
        if exchange.uses_hosts and self._network.inside is None:
            # all ranks are on one host, or each host has one rank
            exchange = TwoPhase()
        stages: dict[str, tuple[Stage, ...]] = {}
        exchanges: dict[str, Exchange] = {}
        for way, compressor in self._ways.items():
            found = self._stages_of(tensors, compressor, exchange)
            if not found:
                continue
            stages[way] = found
            if isinstance(exchange, FewestBytes) and not compressor.reducible:
                # "auto" counts a collective as fixed bytes, whatever the link
                explicit = {e: self._stages_of(tensors, compressor, e) for e in exchange.candidates_for([compressor])}
                fastest = min(explicit, key=lambda e: _seconds(explicit[e]))
                if _EXCHANGE_GAIN * _seconds(explicit[fastest]) < _seconds(found):
                    stages[way], exchanges[way] = explicit[fastest], fastest
        return stages, exchanges

    def _stages_of(self, tensors: Sequence[Tensor], compressor: Compressor, exchange: Exchange) -> tuple[Stage, ...]:
        """List the stages of an exchange; none if all tensors are too small for the compressor."""
        speed = self._speeds.get(compressor, Speed())
        work = bucket_work(tensors, compressor, replace(self._routing, exchange=exchange), self._network, speed)
        inside = exchange.inside_compressor
        of_inside = None if inside is None else self._speeds.get(inside)
        return () if work is None else stages_of(work, speed, self._network, of_inside)


def _seconds(stages: Sequence[Stage]) -> float:
    return sum(stage.seconds for stage in stages)
