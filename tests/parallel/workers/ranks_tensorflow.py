"""The contract of `Ranks` on TensorFlow: at once, while a function is traced, and on a thread beside training."""

from __future__ import annotations

import functools

import tensorflow as tf

from hvd_compress.tensorflow._ranks import BackgroundRanks, TensorFlowRanks
from tests.parallel.cases import Cases
from tests.ranks_contract import PROGRAMS

FRAMEWORK = "tensorflow"

cases = Cases()
for title, program in PROGRAMS.items():
    for kind in (TensorFlowRanks, BackgroundRanks):
        cases[f"{title}[{kind.__name__}]"] = functools.partial(lambda program, kind: program(kind()), program, kind)


@cases.add
def the_contract_holds_while_a_function_is_traced() -> None:
    @tf.function(autograph=False)
    def traced(x: tf.Tensor) -> tf.Tensor:
        for program in PROGRAMS.values():
            program(TensorFlowRanks())
        return x

    assert traced(tf.constant(1.0)).numpy() == 1.0


@cases.add
def functions_of_old_names_are_not_kept() -> None:
    ranks = TensorFlowRanks()
    for step in range(100):
        ranks.agree({"step": step})
    assert ranks._function.cache_info().currsize <= 64
