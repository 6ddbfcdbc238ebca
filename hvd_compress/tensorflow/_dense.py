"""What Horovod combines by its own collectives: gradients that no compressor of ours takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvd_compress.engine import SPARSE
from hvd_compress.fingerprint import Place
from hvd_compress.tensorflow._carried import allgather, carried_dtype, dense_allreduce, dense_grouped_allreduce
from hvd_compress.tensorflow._gradients import Gradient
from hvd_compress.tensorflow._seams import ALLGATHER, ALLREDUCE, split_list
from hvd_compress.tensorflow._settings import Settings, Source, name_in_graph, ranks_of

__all__ = ["DenseWay"]


class DenseWay:
    """Lays Horovod's allreduces of dense gradients, and allgathers of sparse ones, into graphs.

    Args:
        settings: of the exchange.
        sources: of all its gradients.
        wire_names: see `GraphStages`.
        horovods_of: Horovod's compressor of a tensor, by its name.
    """

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[Source],
        wire_names: Mapping[str, str],
        horovods_of: Callable[[str], Any],
    ) -> None:
        self._settings = settings
        self._sources = list(sources)
        self._wire_names = wire_names
        self._horovods_of = horovods_of

    def lay(self, gradients: Mapping[int, Gradient]) -> dict[int, Gradient]:
        """Combine gradients, given and returned by the positions of their sources."""
        results: dict[int, Gradient] = {}
        for i, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices):
                results[i] = self._lay_sparse(i, gradient)
        for group in self._groups([i for i in gradients if i not in results]):
            results |= self._lay_group(group, gradients)
        return results

    def places(self, kinds: Mapping[int, str]) -> list[Place]:
        """The collectives of gradients of these kinds, by positions."""
        sparse = [i for i, kind in kinds.items() if kind == SPARSE]
        places = [Place("allgather", name) for i in sparse for name in self._names_of_sparse(i)]
        for group in self._groups([i for i in kinds if i not in sparse]):
            is_alone = self._is_alone(group)
            places.append(Place("allreduce" if is_alone else "grouped_allreduce", self._name_of(group), len(group)))
        return places

    def bytes_of(self, source: Source, gradient: tf.Tensor) -> tuple[int, int]:
        """What a dense gradient sends, and its own size."""
        numel = int(np.prod(gradient.shape.as_list(), dtype=np.int64))
        with tf.init_scope():
            sent, _ = self._horovods_of(source.name).compress(tf.zeros([1], carried_dtype(gradient.dtype)))
        pairs = 2 if gradient.dtype.is_complex else 1
        return pairs * numel * sent.dtype.size, numel * gradient.dtype.size

    def _lay_group(self, group: list[int], gradients: Mapping[int, Gradient]) -> dict[int, Gradient]:
        settings = self._settings
        factor = settings.gradient_predivide_factor if settings.op == hvd.Average else 1.0
        how = {
            "device_dense": settings.device_dense, "device_sparse": settings.device_sparse,
            "op": settings.op, "prescale_factor": 1.0 / factor,
            "postscale_factor": factor, "process_set": settings.process_set,
            "name": name_in_graph(self._name_of(group)), "ignore_name_scope": True,
            "compression": self._horovods_of(self._sources[group[0]].name),
        }  # fmt: skip
        if self._is_alone(group):
            return {group[0]: dense_allreduce(gradients[group[0]], **how)}
        return dict(zip(group, dense_grouped_allreduce([gradients[i] for i in group], **how), strict=True))

    def _lay_sparse(self, i: int, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
        """As Horovod does it, which names the two allgathers by counting what else there is in the graph."""
        settings = self._settings
        with tf.device(settings.device_sparse):
            values, indices = (
                allgather(part, name_in_graph(name), True, settings.process_set)
                for part, name in zip((gradient.values, gradient.indices), self._names_of_sparse(i), strict=True)
            )
            if settings.op == hvd.Average:
                values = values / tf.cast(ranks_of(settings.process_set), values.dtype)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    def _names_of_sparse(self, i: int) -> list[str]:
        wire_name = self._wire_names[self._sources[i].name]
        return [f"{ALLGATHER}.values.{wire_name}", f"{ALLGATHER}.indices.{wire_name}"]

    def _name_of(self, group: Sequence[int]) -> str:
        wire_name = self._wire_names[self._sources[group[0]].name]
        return f"{ALLREDUCE}.{wire_name}" if self._is_alone(group) else f"{ALLREDUCE}.grouped.{wire_name}"

    def _is_alone(self, group: Sequence[int]) -> bool:
        return len(group) == 1 and self._settings.groups is None

    def _groups(self, positions: Collection[int]) -> list[list[int]]:
        """Positions of dense gradients that Horovod is to combine together, each group in one way."""
        parts = [
            [i for i in group if self._horovods_of(self._sources[i].name) is way]
            for group in self._whole_groups(list(positions))
            for way in dict.fromkeys(self._horovods_of(self._sources[i].name) for i in group)
        ]
        return [part for part in parts if part]

    def _whole_groups(self, left: list[int]) -> list[list[int]]:
        groups = self._settings.groups
        if groups is None:
            return [[i] for i in left]
        if isinstance(groups, int):
            return [list(part) for part in split_list(left, groups)] if left else []
        named = [[i for i in group if i in left] for group in groups]
        grouped = {i for group in named for i in group}
        return named + [[i] for i in left if i not in grouped]
